"""CTC in a recorded program: one operator, with the numbers of torch's loss and of its gradient."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import ipufit
from ipufit.tracing.capture import capture
from ipufit.tracing.unread_values import ctc_loss_and_gradient
from tests.engines import EAGER_OR_NOT
from tests.fitting import assert_close

SAMPLES, STEPS, CLASSES, LENGTH = 4, 6, 5, 3


@pytest.fixture
def sequences():
    """Scores, padded targets, and lengths of both; the last target does not fit its input."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(STEPS, SAMPLES, CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, CLASSES - 1, (SAMPLES, LENGTH), generator=generator)
    return scores, targets, torch.tensor([6, 5, 6, 1]), torch.tensor([3, 1, 2, 3])


def loss_and_gradient(scores, *arguments, **options):
    """Torch's function on what it needs, and the gradient of the scores."""
    scores = scores.detach().requires_grad_()
    loss = functional.ctc_loss(scores.log_softmax(-1), *arguments, **options)
    # Each sample by another number, where they are not reduced.
    factors = torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).reshape(loss.shape)
    return [loss, *torch.autograd.grad((loss * factors).sum(), scores)]


@pytest.mark.parametrize(
    ("reduction", "zero_infinity", "blank"),
    [*itertools.product(("mean", "sum", "none"), (True, False), (0, CLASSES - 1))],
)
def test_a_recording_has_the_bits_of_torch(reduction, zero_infinity, blank, sequences):
    """Also where a target can't come of its input, and its loss is infinite."""
    options = {"reduction": reduction, "zero_infinity": zero_infinity, "blank": blank}
    sequences[1].sub_(1 if blank else 0)
    expected = loss_and_gradient(*sequences, **options)
    assert expected[0].isfinite().all() == zero_infinity
    graph = capture(lambda *tensors: loss_and_gradient(*tensors, **options), sequences)
    for result, tensor in zip(graph(*sequences), expected):
        assert torch.equal(result.nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_lengths_are_those_of_the_call(sequences):
    """A recording follows the lengths that come, not those that it was made with."""
    scores, targets, steps, _ = sequences
    graph = capture(lambda *tensors: loss_and_gradient(*tensors, zero_infinity=True), sequences)
    for others in ([1, 1, 1, 1], [3, 2, 3, 2]):
        arguments = (scores, targets, steps, torch.tensor(others))
        expected = loss_and_gradient(*arguments, zero_infinity=True)
        assert all(map(torch.equal, graph(*arguments), expected))


@pytest.mark.parametrize("form", ["numbers", "concatenated", "one sequence", "int32"])
def test_arguments_come_in_the_forms_of_torch(form, sequences):
    scores, targets, _, _ = sequences
    arguments = {
        "numbers": (targets, (STEPS,) * SAMPLES, (LENGTH,) * SAMPLES),
        "concatenated": (targets.flatten(), (STEPS,) * SAMPLES, (LENGTH,) * SAMPLES),
        "one sequence": (targets[0], torch.tensor(STEPS), torch.tensor(LENGTH)),
        "int32": (targets.int(), *(torch.full((SAMPLES,), n).int() for n in (STEPS, LENGTH))),
    }[form]
    scores = scores[:, 0] if form == "one sequence" else scores
    expected = loss_and_gradient(scores, *arguments, reduction="none")
    graph = capture(lambda x: loss_and_gradient(x, *arguments, reduction="none"), [scores])
    assert expected[0].shape == (() if form == "one sequence" else (SAMPLES,))
    assert all(map(torch.equal, graph(scores), expected))


def test_without_a_gradient_none_is_computed(sequences):
    """In evaluation it would cost as much as the loss."""
    scores = sequences[0].log_softmax(-1)
    loss, gradient = ctc_loss_and_gradient(scores, *sequences[1:], wants_gradient=False)
    assert torch.equal(loss, functional.ctc_loss(scores, *sequences[1:]))
    assert not gradient.numel()


def test_a_gradient_of_the_gradient_is_refused_as_by_torch(sequences):
    """Followed through what is kept as a number, it would be wrong."""
    scores = sequences[0].requires_grad_()
    likely = scores.log_softmax(-1)
    losses = (
        functional.ctc_loss(likely, *sequences[1:]),
        ctc_loss_and_gradient(likely, *sequences[1:])[0],
    )

    def twice(loss):
        (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
        gradient.sum().backward()

    for loss in losses:
        with pytest.raises(RuntimeError, match="_ctc_loss_backward is not implemented"):
            twice(loss)


class Recogniser(nn.Module):
    """Finds symbols in sequences, and computes its own loss."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(4, CLASSES)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x, targets, steps, lengths):
        """Scores of shape (batch, time, classes), and the loss."""
        scores = self.scores(x)
        likely = scores.transpose(0, 1).log_softmax(-1)
        return scores, self.loss(likely, targets, steps, lengths)


@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
def test_fit_equals_a_plain_loop(run_eagerly):
    """With tails: of 18 samples the last micro-batch has two, and is alone in its update."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(18, STEPS, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, CLASSES, (18, LENGTH), generator=generator)
    steps = torch.randint(LENGTH, STEPS + 1, (18,), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (18,), generator=generator)
    data = [
        tuple(part[i : i + 4] for part in (x, targets, steps, lengths)) for i in range(0, 18, 4)
    ]
    torch.manual_seed(2)
    net = Recogniser().double()
    by_hand = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), 0.1), run_eagerly=run_eagerly)
    history = model.fit(
        data, epochs=2, gradient_accumulation=2, device_iterations=2, verbose=0, seed=0
    )
    optimizer = torch.optim.SGD(by_hand.parameters(), 0.1)
    expected = []
    for _ in range(2):
        total = 0.0
        for update in (data[:2], data[2:4], data[4:]):
            samples = sum(len(batch[0]) for batch in update)
            for batch in update:
                _, loss = by_hand(*batch)
                (loss * len(batch[0]) / samples).backward()
                total += loss.item() * len(batch[0])
            optimizer.step()
            optimizer.zero_grad()
        expected.append(total / 18)
    assert_close(net, by_hand, atol=1e-12)
    assert history.history["loss"] == pytest.approx(expected, rel=1e-12)
