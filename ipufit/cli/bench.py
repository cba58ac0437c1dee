"""``ipufit bench``: how fast the program of a script runs, one way and another."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from ipufit.analysis.tuner import Trial, seed_of_trial
from ipufit.cli.intercept_fit import Examination, FitCall
from ipufit.core.batch import CombinedBatch
from ipufit.core.compile_arguments import GRAPH, INDUCTOR, KERNELS, OFF
from ipufit.core.plan import Plan
from ipufit.errors import CaptureError, ConfigurationError, DataError
from ipufit.tracing.comparison import Tolerance, distance
from ipufit.training.arguments import FitConfig
from ipufit.training.model import Model
from ipufit.training.session import Session
from ipufit.training.trainer import Job

_ALIKE, _DIFFERENT = 0, 1

# Numbers and texts by name, as they are printed as JSON.
_Values = Dict[str, Any]

_ROUNDS = 3
_EMBEDDED = "embedded"


@dataclasses.dataclass
class _Way:
    """One way to run, and what was seen of it.

    Attributes:
        name: for people.
        jit: of ``compile``; None is as compiled.
        rates: updates per second in each round, the median over its executions.
        waits: seconds of an execution's waiting for data, the same.
        executions: how many were timed.
        losses: of the first execution, by micro-batch.
        refused: why it can't run; None where it can.
        ran_as: the way that was taken in the end, a name of ``LOWERINGS``; None of another engine.
        explanation: sentences of the engine about that.
    """

    name: str
    jit: Optional[str]
    rates: List[float] = dataclasses.field(default_factory=list)
    waits: List[float] = dataclasses.field(default_factory=list)
    executions: int = 0
    losses: Optional[Tensor] = None
    refused: Optional[str] = None
    ran_as: Optional[str] = None
    explanation: List[str] = dataclasses.field(default_factory=list)


class Bench(Examination[_Values]):
    """Times what a script's first ``fit`` would train.

    ``--seconds`` are for all that is timed; recording comes on top. With ``--inductor`` the program
    is compiled with TorchInductor too.

    The exit status is 0 where all ways give the same losses, 1 where one does not, 2 where the
    script failed or never calls fit.
    """

    def look(self, call: FitCall) -> _Values:
        """Time the program in each way."""
        session = call.session
        session.processes.require_single("ipufit bench", "Start it without a launcher.")
        ways = _ways(session, self.options.inductor)
        plan = _measure(ways, session, call.model, call.check_arguments(), self.options.seconds)
        return _result(ways, session, plan)

    def show(self, results: List[_Values]) -> Tuple[int, str, object]:
        """Show a table of all ways."""
        (result,) = results
        return _ALIKE if result["agree"] else _DIFFERENT, "\n".join(_lines(result)), result


def _ways(session: Session, with_inductor: bool) -> List[_Way]:
    """The module itself first: all others are compared with it.

    Raises:
        ConfigurationError: TorchInductor is wished and can't be had.
    """
    name = session.engine.name
    if name != _EMBEDDED:
        if with_inductor:
            raise ConfigurationError(
                "--inductor needs the embedded engine, but the script's model runs on the "
                f"{name} engine. Leave it out."
            )
        return [_Way(name, None)]
    names = [OFF, GRAPH, KERNELS]
    if with_inductor:
        # Imported here: the engine is built on use.
        from ipufit.engines.embedded.inductor.requirements import missing

        lacking = missing()
        if lacking is not None:
            raise ConfigurationError(f"--inductor needs {lacking}")
        names.append(INDUCTOR)
    return [_Way(name, name) for name in names]


def _measure(
    ways: List[_Way], session: Session, model: Model, request: FitConfig, seconds: float
) -> Plan:
    """Each way in turn, several times, so that a slow moment of the machine meets all of them.

    Returns:
        The plan, with the micro-batch size that the data really has.

    Raises:
        CaptureError: the program that the script asks for can't be recorded.
        ConfigurationError: the way that all others are compared with can't run.
    """
    plan = request.plan
    seed = seed_of_trial(request.asked_seed, session)
    share = seconds / (_ROUNDS * len(ways))
    for _ in range(_ROUNDS):
        for way in ways:
            if way.refused is not None:
                continue
            engine = model._make_engine()
            trial = Trial(session, lambda engine=engine: engine, way.jit)  # type: ignore[misc]
            config = dataclasses.replace(session.config, jit=way.jit or session.config.jit)
            try:
                session.check_engine(config)
                with trial.running(request.source, request.plan, seed, lambda _: None) as job:
                    plan = job.plan
                    _round(way, job, share)
                    if way.jit is not None:
                        # Not every program can run in each way.
                        way.ran_as = OFF if way.jit == OFF else engine.way
                        way.explanation = engine.explain(config, {})
            except (CaptureError, ConfigurationError) as error:
                # Such as detect_nan, which has no compiled form, or what only run_eagerly runs.
                is_wanted = isinstance(error, CaptureError) and session.config.jit != OFF
                if is_wanted or way is ways[0]:
                    raise
                way.refused = str(error)
    return plan


def _round(way: _Way, job: Job, seconds: float) -> None:
    """Executions as large as the first, which itself is not timed, as long as the time lasts."""
    rates: List[float] = []
    waits: List[float] = []
    size, end = 0, 0.0
    for epoch, batch, waited in _executions(job):
        begin = time.perf_counter()
        anchors = job.run(batch)
        now = time.perf_counter()
        if not size:
            size, end = batch.samples, now + seconds
            way.losses = anchors.losses.detach().clone() if way.losses is None else way.losses
        # Data that comes in other sizes every time has none as large.
        elif batch.samples == size or (epoch > 1 and not rates):
            rates.append(batch.updates(job.plan) / (now - begin))
            waits.append(waited)
        if rates and now >= end:
            break
    way.rates.append(statistics.median(rates))
    way.waits.append(statistics.median(waits))
    way.executions += len(rates)


def _executions(job: Job) -> Iterator[Tuple[int, CombinedBatch, float]]:
    """Yield index, batch and seconds of waiting of one execution after another, over epochs.

    Raises:
        DataError: an epoch has none.
    """
    for epoch in itertools.count():
        is_empty = True
        with job.executions(epoch) as batches:
            begin = time.perf_counter()
            for batch in batches:
                is_empty = False
                yield epoch, batch, time.perf_counter() - begin
                begin = time.perf_counter()
        if is_empty:
            raise DataError(
                "training data must yield batches every time it is read, but yielded none in epoch "
                f"{epoch + 1}. Pass a DataLoader or another object whose __iter__ starts again."
            )


def _result(ways: List[_Way], session: Session, plan: Plan) -> _Values:
    """Return all that is printed, in plain values."""
    base = ways[0]
    assert base.losses is not None
    dtype = _dtype(session)
    rows = [_way_values(way, base, plan.update_size, dtype) for way in ways]
    return {
        "title": type(session.module).__name__,
        "engine": session.engine.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compiled": session.config.jit if base.jit is not None else None,
        "update_size": plan.update_size,
        "device_iterations": plan.device_iterations,
        "rounds": _ROUNDS,
        "agree": all(each["agrees"] for each in rows if each["refused"] is None),
        "ways": rows,
    }


def _way_values(way: _Way, base: _Way, update_size: int, dtype: torch.dtype) -> _Values:
    values: _Values = {"name": way.name, "refused": way.refused}
    if way.refused is not None:
        return values
    assert way.losses is not None
    assert base.losses is not None
    away = distance(way.losses, base.losses)
    allowed = Tolerance().of(dtype, away.scale)
    ratios = [rate / of_base for rate, of_base in zip(way.rates, base.rates)]
    rate = statistics.median(way.rates)
    values["ran_as"], values["said"] = way.ran_as, way.explanation
    values.update(
        executions=way.executions,
        updates_per_second=rate,
        samples_per_second=rate * update_size,
        ratio={"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        seconds_waiting_for_data=statistics.median(way.waits),
        # Infinity is no JSON: None is a loss that is a number in one of the two alone.
        loss_away=away.absolute if away.absolute < float("inf") else None,
        loss_may_be_away=allowed,
        agrees=away.absolute <= allowed,
    )
    return values


def _dtype(session: Session) -> torch.dtype:
    """Return the coarsest dtype in which anything is computed."""
    coarse = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    dtypes = {each.dtype for each in session.module.parameters()}
    precision = session.config.precision
    dtypes.update(each for each in (precision.autocast, precision.inputs) if each is not None)
    return next((each for each in coarse if each in dtypes), torch.float32)


def _lines(result: _Values) -> List[str]:
    engine, count = result["engine"], result["device_iterations"]
    lines = [
        f"{result['title']} on the {engine} engine: updates of {result['update_size']} samples, "
        f"{count} in an execution; torch {result['torch']}, threads: {result['threads']}.",
        "",
        f"  {'way':12}{'updates/s':>12}{'samples/s':>12}{'to first':>10}{'(lowest, highest)':>20}"
        f"{'data wait':>12}",
    ]
    for way in result["ways"]:
        if way["refused"] is not None:
            continue
        ratio = way["ratio"]
        spread = f"({ratio['low']:.2f}, {ratio['high']:.2f})"
        wait = f"{1000 * way['seconds_waiting_for_data']:.2f} ms"
        lines.append(
            f"  {way['name']:12}{way['updates_per_second']:12,.1f}"
            f"{way['samples_per_second']:12,.0f}{ratio['median']:10.2f}{spread:>20}{wait:>12}"
        )
    lines += ["", f"Medians of {result['rounds']} rounds, without the wait for data."]
    if result["compiled"] is not None:
        lines.append(f"The script compiles with jit={result['compiled']!r}.")
    for way in result["ways"]:
        if way["refused"] is not None:
            lines.append(f"{way['name']} can't run: {way['refused']}")
            continue
        if way["ran_as"] not in (None, way["name"]):
            why = "No faster kernel fits."
            if way["name"] == INDUCTOR:
                why = " ".join(way["said"])
            lines.append(f"{way['name']} ran as {way['ran_as']} here. {why}")
        if not way["agrees"]:
            away = "infinity" if way["loss_away"] is None else f"{way['loss_away']:.3g}"
            lines.append(
                f"WRONG: the losses of {way['name']} in the first execution differ by {away} "
                f"from those of {result['ways'][0]['name']}; the tolerance is "
                f"{way['loss_may_be_away']:.3g}. `ipufit check` finds code that behaves "
                "differently in a recorded program; if it finds nothing, please report this."
            )
    return lines
