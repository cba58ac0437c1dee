"""The batch algebra: against a plain simulation, by property, and by the exact texts users read."""

from __future__ import annotations

import dataclasses
import doctest
import enum
import itertools
import re
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ipufit.core.plan
from ipufit.core.plan import Place, Plan, Tail
from ipufit.errors import PlanError

IPUS = "`ipus`, the total number of IPUs, must be "


class Whole:
    """Counts like an int without being one, as NumPy's and torch's integers do."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Length(enum.IntEnum):
    """An int that is not exactly an int."""

    NINE = 9


@st.composite
def plans(draw: Any, most_samples: int = 300) -> Plan:
    """Any plan that `Plan.make` accepts, small enough to be simulated."""
    training = draw(st.booleans())
    stages = draw(st.integers(1, 4))
    return Plan.make(
        micro_batch_size=draw(st.integers(1, 9)),
        ipus=stages * draw(st.integers(1, 5)),
        device_iterations=draw(st.integers(1, 5)),
        gradient_accumulation=draw(st.integers(1, 5)) if training else 1,
        stages=stages,
        samples=draw(st.integers(0, most_samples)),
        dropped=draw(st.integers(0, 3)),
        training=training,
        auto_round_ipus=True,
    )


small = st.integers(-3, 20)
plain_values = [True, False, None, "8", "many", b"2", [4], 8.0, 1.5, -2.5, 1e300, float("nan")]
other_values = [np.float32(3), np.bool_(True), np.int64(6), np.array([1, 2]), Whole(3)]
odd_values = st.sampled_from([*plain_values, float("inf"), *other_values])
anything = st.one_of(small, small, small, odd_values)
random_arguments = st.fixed_dictionaries(
    {
        "micro_batch_size": anything,
        "ipus": anything,
        "device_iterations": anything,
        "gradient_accumulation": anything,
        "stages": anything,
        "samples": anything,
        "dropped": anything,
        "training": st.booleans(),
        "auto_round_ipus": st.one_of(st.booleans(), st.sampled_from([1, None, "yes"])),
    }
)


def cut(items: Sequence[Any], size: int) -> List[Sequence[Any]]:
    """Consecutive pieces of ``size`` items, the last one perhaps smaller."""
    pieces: List[Any] = []
    for item in items:
        if not pieces or len(pieces[-1]) == size:
            pieces.append([])
        pieces[-1].append(item)
    return pieces


def refusal(**arguments: Any) -> PlanError:
    """The error for these arguments, after its suggestion was tried in their place."""
    arguments = {"micro_batch_size": 8, **arguments}
    with pytest.raises(PlanError) as caught:
        Plan.make(**arguments)
    Plan.make(**{**arguments, **caught.value.suggestion})
    return caught.value


@pytest.mark.long
@given(plans())
def test_counts_agree_with_plain_chunking(plan: Plan) -> None:
    """A count that is off by one loses samples or trains on some twice."""
    assert plan.samples is not None
    micro_batches = cut(range(plan.samples), plan.micro_batch_size)
    updates = cut(micro_batches, plan.gradient_accumulation * plan.replicas)
    executions = cut(updates, plan.device_iterations)

    def samples(execution: Sequence[Any]) -> int:
        return sum(len(micro_batch) for update in execution for micro_batch in update)

    full = [e for e in executions if samples(e) == plan.combined_batch_size]
    rest = executions[len(full) :]
    for execution in full:
        assert len(execution) == plan.device_iterations
        assert sum(map(len, execution)) == plan.micro_batches_per_execution
        assert {len(update) for update in execution} == {plan.micro_batches_per_update}
        assert {samples([update]) for update in execution} == {plan.update_size}
    assert plan.micro_batches_per_epoch == len(micro_batches)
    assert plan.updates_per_epoch == len(updates)
    assert plan.executions_per_epoch == len(executions)
    sizes = [tuple(len(micro_batch) for micro_batch in update) for update in updates]
    assert list(plan.updates(plan.samples)) == sizes
    if not rest:
        assert plan.tail is None
    else:
        (last,) = rest
        assert plan.tail == Tail(
            samples=samples(last),
            updates=len(last),
            micro_batches=sum(len(update) for update in last),
            last_update_size=samples([last[-1]]),
            last_micro_batch_size=len(last[-1][-1]),
        )


@pytest.mark.long
@given(plans())
def test_place_walks_iteration_accumulation_replica_position(plan: Plan) -> None:
    """The order is a contract with PopTorch: another one would hand samples to wrong replicas."""
    expected = []
    for iteration in range(plan.device_iterations):
        for accumulation in range(plan.gradient_accumulation):
            for replica in range(plan.replicas):
                for position in range(plan.micro_batch_size):
                    expected.append((iteration, accumulation, replica, position))
    assert [plan.place(index) for index in range(plan.combined_batch_size)] == expected
    assert [plan.index(*place) for place in expected] == list(range(plan.combined_batch_size))


def test_index_is_the_written_formula() -> None:
    """The formula in the design is what other files are checked against."""
    di, ga, replicas, mb = 3, 5, 2, 7
    plan = Plan.make(
        micro_batch_size=mb, ipus=replicas, device_iterations=di, gradient_accumulation=ga
    )
    assert plan.shape == (di, ga, replicas, mb)
    for it, a, r, i in itertools.product(range(di), range(ga), range(replicas), range(mb)):
        index = ((it * ga + a) * replicas + r) * mb + i
        assert plan.index(it, a, r, i) == index
        assert plan.place(index) == Place(iteration=it, accumulation=a, replica=r, position=i)


def test_places_outside_the_combined_batch_are_refused() -> None:
    """A negative index that wraps around would read another replica's samples."""
    plan = Plan.make(micro_batch_size=8, ipus=4, device_iterations=2)
    with pytest.raises(IndexError) as caught:
        plan.place(64)
    text = "index in the combined batch must be 0 to 63, got 64. Count from 0."
    assert str(caught.value) == text
    with pytest.raises(IndexError, match="got -1"):
        plan.place(-1)
    with pytest.raises(IndexError) as caught:
        plan.index(1, 0, 4, 0)
    assert str(caught.value) == "replica must be 0 to 3, got 4. Count from 0."
    with pytest.raises(IndexError, match="accumulation must be 0 to 0, got 1"):
        plan.index(0, 1, 0, 0)
    with pytest.raises(TypeError):
        plan.place(1.0)  # type: ignore[arg-type]


def fault_of(arguments: Dict[str, Any]) -> Optional[PlanError]:
    """The error for these arguments, or None where they are accepted."""
    try:
        Plan.make(**arguments)
    except PlanError as error:
        return error
    return None


@pytest.mark.long
@given(random_arguments)
def test_every_suggestion_is_accepted(arguments: Dict[str, Any]) -> None:
    """Advice that leads to the next error is worse than none."""
    error = fault_of(arguments)
    if error is None:
        return
    assert error.faults
    assert error.suggestion
    assert str(error) == "\n".join(error.faults)
    repaired = Plan.make(**{**arguments, **error.suggestion})
    sound = {name for name in arguments if name not in error.suggestion}
    for name in sound & {"micro_batch_size", "device_iterations", "stages", "samples"}:
        value = arguments[name]
        expected = value if value is None else value.__index__()
        assert getattr(repaired, name) == expected


@pytest.mark.long
@given(st.integers(-2, 70), st.integers(-1, 9), st.booleans())
def test_ipus_are_accepted_by_the_rule_and_the_nearest_is_suggested(
    ipus: int, stages: int, rounding: bool
) -> None:
    """The rule is written out once more, number by number, so that it can't drift."""

    def valid(total: int, rounded: bool) -> bool:
        good = total > 0 and total % stages == 0
        return good and (rounded or total in (1, 2, 4, 8, 16, 32, 64, 128))

    arguments: Dict[str, Any] = {"micro_batch_size": 1, "ipus": ipus, "stages": stages}
    if stages > 0 and valid(ipus, rounding):
        plan = Plan.make(auto_round_ipus=rounding, **arguments)
        assert plan.ipus == ipus
        assert plan.replicas == ipus / stages
        assert plan.reserved_ipus == min(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n >= ipus)
        assert plan.idle_ipus == plan.reserved_ipus - ipus
        return
    error = refusal(auto_round_ipus=rounding, **arguments)
    if stages > 0:
        rounded = bool(error.suggestion.get("auto_round_ipus", rounding))
        assert rounded or stages in (1, 2, 4, 8)
        choices = [n for n in range(1, 200) if valid(n, rounded)]
        distance = min(abs(n - ipus) for n in choices)
        suggested = error.suggestion.get("ipus", ipus)
        assert isinstance(suggested, int)
        assert abs(suggested - ipus) == distance


def test_all_faults_are_reported_together_in_the_order_of_the_arguments() -> None:
    """One fault at a time makes a user start a long job once per typo."""
    error = refusal(
        micro_batch_size=0,
        ipus=6,
        device_iterations=1.5,
        gradient_accumulation=True,
        stages=4,
        samples=-1,
        dropped=-1,
        auto_round_ipus=0,
    )
    assert error.faults == (
        "`batch_size` of the loader must be a positive whole number, got 0. Try 1.",
        IPUS + "a power of two that stages=4 divides, got 6. Try 4 or 8.",
        "`device_iterations` must be a positive whole number. 1.5 is a float, write 1 or 2.",
        "`gradient_accumulation` must be a positive whole number. True is a bool, write 1.",
        "`samples` must be a whole number of at least 0, got -1. Try 0.",
        "`dropped` must be a whole number of at least 0, got -1. Try 0.",
        "`auto_round_ipus` must be a bool. 0 is an int, write True or False.",
    )
    assert error.suggestion == {
        "micro_batch_size": 1,
        "ipus": 4,
        "device_iterations": 1,
        "gradient_accumulation": 1,
        "samples": 0,
        "dropped": 0,
        "auto_round_ipus": False,
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ipus": 0}, IPUS + "a power of two, got 0. Try 1."),
        ({"ipus": -1}, IPUS + "a power of two, got -1. Try 1."),
        (
            {"ipus": 3},
            IPUS + "a power of two, got 3. "
            "Try 2 or 4, or auto_round_ipus=True to reserve 4 and leave 1 idle.",
        ),
        ({"ipus": 8.0}, IPUS + "a power of two. 8.0 is a float, write 8."),
        ({"ipus": 6.0}, IPUS + "a power of two. 6.0 is a float, write 4 or 8."),
        (
            {"ipus": 2, "stages": 4},
            IPUS + "a power of two that stages=4 divides, got 2. Try 4.",
        ),
        (
            {"ipus": 12, "stages": 4},
            IPUS + "a power of two that stages=4 divides, got 12. "
            "Try 8 or 16, or auto_round_ipus=True to reserve 16 and leave 4 idle.",
        ),
        (
            {"ipus": 6, "stages": 3},
            IPUS + "a power of two that stages=3 divides (there is none), got 6. "
            "Try auto_round_ipus=True to reserve 8 and leave 2 idle.",
        ),
        (
            {"ipus": 8, "stages": 3},
            IPUS + "a power of two that stages=3 divides (there is none), got 8. "
            "Try 6 or 9 with auto_round_ipus=True.",
        ),
        (
            {"stages": 3},
            IPUS + "a power of two that stages=3 divides (there is none), got None, "
            "which means 3. Try auto_round_ipus=True to reserve 4 and leave 1 idle.",
        ),
        (
            {"ipus": 8, "stages": 3, "auto_round_ipus": True},
            IPUS + "a multiple of stages=3, got 8. Try 6 or 9.",
        ),
        ({"stages": 0}, "`stages` must be a positive whole number, got 0. Try 1."),
        (
            {"device_iterations": 0},
            "`device_iterations` must be a positive whole number, got 0. Try 1.",
        ),
        (
            {"device_iterations": 1.5},
            "`device_iterations` must be a positive whole number. 1.5 is a float, write 1 or 2.",
        ),
        (
            {"device_iterations": 8.0},
            "`device_iterations` must be a positive whole number. 8.0 is a float, write 8.",
        ),
        (
            {"device_iterations": True},
            "`device_iterations` must be a positive whole number. True is a bool, write 1.",
        ),
        (
            {"device_iterations": None},
            "`device_iterations` must be a positive whole number. None is not allowed, write 1.",
        ),
        (
            {"device_iterations": "8"},
            "`device_iterations` must be a positive whole number. '8' is a str, write 8.",
        ),
        (
            {"gradient_accumulation": -2},
            "`gradient_accumulation` must be a positive whole number, got -2. Try 1.",
        ),
        (
            {"gradient_accumulation": 4, "training": False},
            (
                "`gradient_accumulation` must be 1 in evaluate and predict, "
                "which make no updates, got 4. Try 1."
            ),
        ),
    ],
)
def test_a_fault_says_what_was_expected_what_came_and_what_to_try(
    arguments: Dict[str, Any], text: str
) -> None:
    """Users search for these texts, and the troubleshooting page is headed by them."""
    assert str(refusal(**arguments)) == text


def test_whole_numbers_of_any_kind_become_ints() -> None:
    """A NumPy integer in a plan would later fail in JSON or show up in an explanation."""
    plan = Plan.make(
        micro_batch_size=np.int64(8),
        ipus=Whole(4),
        gradient_accumulation=np.uint8(2),
        samples=Length.NINE,
        fixed_updates=np.int32(3),
    )
    work = {"micro_batch_size": 8, "ipus": 4, "gradient_accumulation": 2}
    assert plan == Plan.make(**work, samples=9, fixed_updates=3)
    for field in dataclasses.fields(plan):
        if field.name != "batches":  # is not an argument
            assert type(getattr(plan, field.name)) in (int, bool)


def test_left_out_ipus_mean_one_replica() -> None:
    """A pipelined model must start without the user counting its stages."""
    assert Plan.make(micro_batch_size=1).ipus == 1
    plan = Plan.make(micro_batch_size=1, stages=4)
    assert (plan.ipus, plan.replicas, plan.idle_ipus) == (4, 1, 0)


def test_a_stream_has_no_epoch_counts() -> None:
    """A guess at the length of a stream would end the epoch early."""
    plan = Plan.make(micro_batch_size=8)
    assert plan.micro_batches_per_epoch is None
    assert plan.updates_per_epoch is None
    assert plan.executions_per_epoch is None
    assert plan.tail is None
    text = "One epoch = all batches of the data, whose number is unknown; a smaller last update is "
    assert f"{text}used too.\n" in plan.explain()
    counted = dataclasses.replace(plan, batches=13, device_iterations=4)
    assert (
        "\nOne epoch = 13 batches = 13 updates in 4 executions; a smaller last update is used too."
        in counted.explain()
    )


def test_a_plan_cannot_be_changed() -> None:
    """Programs are compiled for a plan; one that changed later would feed them wrong shapes."""
    plan = Plan.make(micro_batch_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.replicas = 2  # type: ignore[misc]
    assert hash(plan) == hash(Plan.make(micro_batch_size=8))


def test_explain_tells_a_training_plan_with_tail_and_dropped_samples() -> None:
    """A newcomer learns the words from this text, so it is read as a whole."""
    plan = Plan.make(
        micro_batch_size=8,
        ipus=4,
        device_iterations=10,
        gradient_accumulation=2,
        samples=2000,
        dropped=5,
    )
    assert plan.explain() == (
        "Plan for training\n  micro-batch             8  samples that one replica sees at once; "
        "the loader's batch_size\n  gradient accumulation   2  micro-batches that a replica sums "
        "for one update\n  replicas                4  copies of the model, each with its own "
        "micro-batches\n  stages                  1  IPUs that share one replica\n  device "
        "iterations      10  updates per execution, which is one call of the program\nOne update = "
        "8 samples x 2 accumulation x 4 replicas = 64 samples.\nOne execution = 64 samples x 10 "
        "device iterations = 640 samples.\nOne epoch = 2000 samples = 32 updates in 4 "
        "executions.\nThe last 80 samples run as one smaller execution: 2 updates, 10 "
        "micro-batches.\nIts last update has 16 samples, its last micro-batch 8.\ndrop_last=True "
        "leaves out 5 more samples per epoch; drop_last=False uses all.\nIPUs: 4 planned, 4 used "
        "(4 replicas x 1 stage), none idle."
    )


def test_explain_tells_an_inference_plan_with_idle_ipus() -> None:
    """Inference makes no updates, so the word must not appear."""
    plan = Plan.make(
        micro_batch_size=1,
        ipus=6,
        device_iterations=5,
        stages=3,
        samples=11,
        training=False,
        auto_round_ipus=True,
    )
    assert plan.explain() == (
        "Plan for inference (evaluate, predict)\n  micro-batch        1  samples that one "
        "replica sees at once; the loader's batch_size\n  replicas           2  copies of the "
        "model, each with its own micro-batches\n  stages             3  IPUs that share one "
        "replica\n  device iterations  5  forward passes per execution, which is one call of "
        "the program\nOne device iteration = 1 sample x 2 replicas = 2 samples.\nOne execution "
        "= 2 samples x 5 device iterations = 10 samples.\nOne epoch = 11 samples = 6 device "
        "iterations in 2 executions.\nThe last 1 sample runs as one smaller execution: 1 device "
        "iteration, 1 micro-batch.\nIPUs: 8 planned, 6 used (2 replicas x 3 stages), 2 idle."
    )


NOUN = re.compile(
    r"(\d+) (?:more )?(samples?|replicas?|stages?|updates?|executions?|device iterations?"
    r"|micro-batch(?:es)?)\b"
)


@pytest.mark.long
@given(plans(most_samples=10**7))
def test_explain_is_short_and_grammatical(plan: Plan) -> None:
    """The text is printed in terminals and logs, where colour, wide lines and "1 samples" jar."""
    text = plan.explain()
    lines = text.split("\n")
    assert 8 <= len(lines) <= 14
    assert max(map(len, lines)) <= 100
    assert all(line.isascii() and line.isprintable() for line in lines)
    counted = "\n".join(line for line in lines if not line.startswith("  "))
    for count, noun in NOUN.findall(counted):
        assert noun.endswith("s") == (count != "1"), (count, noun)
    assert plan.training or "update" not in text


@pytest.mark.long("ipu-standin")
def test_the_examples_in_the_docstrings_run() -> None:
    """They are the first thing a reader copies."""
    results = doctest.testmod(ipufit.core.plan)
    assert results.attempted > 0
    assert results.failed == 0
