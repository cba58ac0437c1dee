"""poptorch.ctc_beam_search_decoder against all alignments."""

import itertools
import math

import pytest
import torch

from ipufit import poptorch
from tests.poptorch.recording import record


def by_alignments(rows, blank):
    """The log-probability of every path: the sum over all alignments that collapse to it."""
    found = {}
    for alignment in itertools.product(range(len(rows[0])), repeat=len(rows)):
        merged = [a for a, _ in itertools.groupby(alignment)]
        path = tuple(label for label in merged if label != blank)
        score = math.exp(sum(row[label] for row, label in zip(rows, alignment)))
        found[path] = found.get(path, 0.0) + score
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [(path, math.log(score)) for path, score in ordered]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("blank", [0, 2])
def test_the_best_paths_are_those_of_all_alignments(seed, blank):
    steps, batch, classes, top = 5, 3, 3, 6
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, batch, classes, generator=generator, dtype=torch.float64)
    probs = (2 * noise).log_softmax(2)
    lengths = torch.tensor([5, 3, 4])
    recorded = record(
        lambda p, n: poptorch.ctc_beam_search_decoder(p, n, blank, 500, top),
        torch.zeros_like(probs),
        lengths,
    )
    scores, counts, paths = recorded(probs, lengths)
    assert (scores.dtype, counts.dtype, paths.dtype) == (torch.float64, torch.int32, torch.int32)
    assert (scores.shape, paths.shape) == ((batch, top), (batch, top, steps))
    for sample in range(batch):
        expected = by_alignments(probs[: lengths[sample], sample].tolist(), blank)[:top]
        for place, (path, score) in enumerate(expected):
            torch.testing.assert_close(scores[sample, place].item(), score, rtol=1e-12, atol=0)
            assert counts[sample, place] == len(path)
            padded = [*path, *[blank] * (steps - len(path))]
            assert paths[sample, place].tolist() == padded


def test_one_beam_keeps_the_best_path_at_each_step():
    """With one beam 'a' is dropped at the first step, although it is the best in the end."""
    probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]], dtype=torch.float64).log()[:, None]
    lengths = torch.tensor([2])
    score, count, _ = poptorch.ctc_beam_search_decoder(probs, lengths, beam_width=1)
    torch.testing.assert_close(score.item(), math.log(0.36), rtol=1e-12, atol=0)
    assert count.item() == 0
    score, count, path = poptorch.ctc_beam_search_decoder(probs, lengths)
    torch.testing.assert_close(score.item(), math.log(0.64), rtol=1e-12, atol=0)
    assert (count.item(), path.tolist()) == (1, [[[1, 0]]])


def test_paths_that_do_not_exist_have_no_probability():
    probs = torch.zeros(1, 1, 2).log_softmax(2)
    scores, counts, paths = poptorch.ctc_beam_search_decoder(probs, torch.tensor([1]), top_paths=3)
    assert scores[0, 2].item() == -math.inf
    assert counts.tolist() == [[0, 1, 0]]
    assert paths.tolist() == [[[0], [1], [0]]]
    scores, counts, _ = poptorch.ctc_beam_search_decoder(probs, torch.tensor([0]))
    assert (scores.tolist(), counts.tolist()) == ([[0.0]], [[0]])


def test_lengths_are_looked_at_when_the_model_runs():
    probs = torch.zeros(2, 1, 2).log_softmax(2)
    recorded = record(poptorch.ctc_beam_search_decoder, probs, torch.tensor([9]))
    with pytest.raises(poptorch.Error) as failure:
        recorded(probs, torch.tensor([3]))
    assert failure.value.message == (
        "ctc_beam_search_decoder: lengths must be from 0 to the input length 2, got 3 for sample 0."
    )


GIVEN = {"probs": torch.zeros(2, 1, 3), "lengths": torch.tensor([2])}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"probs": [1]},
            "ctc_beam_search_decoder: probs must be a torch.tensor argument. <class 'list'> is not "
            "supported.",
        ),
        (
            {"lengths": 2},
            "ctc_beam_search_decoder: lengths must be a torch.tensor argument. <class 'int'> is "
            "not supported.",
        ),
        (
            {"probs": torch.zeros(2, 3)},
            "Incorrect shape for first input to CTC beam search decoder. Expected (input length, "
            "batch size, classes), got (2, 3).",
        ),
        (
            {"lengths": torch.tensor([2, 2])},
            "ctc_beam_search_decoder: lengths must have one number for each sample: expected "
            "shape (1,), got (2,).",
        ),
        ({"blank": 3}, "ctc_beam_search_decoder: blank must be one of the 3 classes, got 3."),
        (
            {"beam_width": 2, "top_paths": 3},
            "ctc_beam_search_decoder: top_paths must be from 1 to beam_width, which is 2, got 3.",
        ),
    ],
)
def test_what_can_not_be_decoded_is_refused(changes, text):
    with pytest.raises(poptorch.Error) as failure:
        poptorch.ctc_beam_search_decoder(**{**GIVEN, **changes})
    assert failure.value.message == text


TARGETS = torch.tensor([[1, 2, 2], [3, 1, 1]])
INPUT_LENGTHS, TARGET_LENGTHS = torch.tensor([6, 5]), torch.tensor([3, 1])


def loss_step(lengths, **options):
    def step(log_probs, targets, input_lengths, target_lengths):
        given = {
            "inputs": (input_lengths, target_lengths),
            "lists": (INPUT_LENGTHS.tolist(), tuple(TARGET_LENGTHS.tolist())),
        }[lengths]
        log_probs = log_probs.detach().requires_grad_()
        loss = torch.nn.functional.ctc_loss(log_probs, targets, *given, **options)
        return [loss.detach(), *torch.autograd.grad(loss * 3, [log_probs])]

    return step


@pytest.mark.grid
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [True, False])
@pytest.mark.parametrize("blank", [0, 4])
@pytest.mark.parametrize("lengths", ["inputs", "lists"])
def test_the_loss_looks_at_lengths_when_the_model_runs(lengths, blank, zero_infinity, reduction):
    step = loss_step(lengths, blank=blank, zero_infinity=zero_infinity, reduction=reduction)
    generator = torch.Generator().manual_seed(6)
    noise = torch.randn(6, 2, 5, generator=generator, dtype=torch.float64)
    given = (noise.log_softmax(2), TARGETS, INPUT_LENGTHS, TARGET_LENGTHS)
    recorded = record(step, torch.zeros_like(noise), TARGETS * 0, *given[2:], training=True)
    assert recorded.trace.losses == 1
    torch.testing.assert_close(recorded(*given), step(*given), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("zero_infinity", [True, False])
def test_a_target_that_does_not_fit_has_an_infinite_loss(zero_infinity):
    step = loss_step("inputs", zero_infinity=zero_infinity, reduction="sum")
    probs = torch.zeros(6, 2, 5, dtype=torch.float64).log_softmax(2)
    given = (probs, TARGETS, torch.tensor([3, 2]), TARGET_LENGTHS)
    got, expected = record(step, *given, training=True)(*given), step(*given)
    assert got[0].isfinite().item() is zero_infinity
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14, equal_nan=True)


def test_the_loss_of_one_sample_and_of_half_numbers():
    probs = torch.randn(6, 5, generator=torch.Generator().manual_seed(7)).log_softmax(1)

    def model(log_probs):
        return torch.nn.functional.ctc_loss(log_probs, TARGETS[:1], (6,), (3,))

    (got,) = record(model, probs)(probs)
    torch.testing.assert_close(got, model(probs[:, None]))
    (half,) = record(model, probs.half())(probs.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), got, rtol=2e-3, atol=0)
