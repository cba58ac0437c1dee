"""What a recorded model does with torch's functions: refused, cast, replaced."""

import pytest
import torch
import torch.nn.functional as F

from ipufit import poptorch
from ipufit.poptorch._operators.routing import cast
from tests.poptorch.recording import record


def refusal(function, *tensors):
    with pytest.raises(poptorch.Error) as failure:
        record(function, *tensors)
    return failure.value.message


IMAGE = torch.ones(1, 1, 2, 2)
COUNTS = torch.tensor([0, 2, 2])
LOGITS, CLASSES = torch.zeros(2, 3), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (
            torch.nn.Upsample(scale_factor=2, mode="linear"),
            torch.ones(1, 1, 2),
            "Unsupported upsample mode aten::upsample_linear1d: currently only 'nearest' is "
            "supported for this input. Use mode='nearest', or bilinear on a 4-dimensional input.",
        ),
        (
            lambda x: F.interpolate(x, 4, None, "trilinear"),
            torch.ones(1, 1, 2, 2, 2),
            "Unsupported upsample mode aten::upsample_trilinear3d: currently only 'nearest' is "
            "supported for this input. Use mode='nearest', or bilinear on a 4-dimensional input.",
        ),
        (
            lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=True),
            IMAGE,
            "Only support align_corners=False. Leave it out for mode='bicubic'.",
        ),
        (
            lambda x: F.interpolate(x, scale_factor=(2, 3), mode="bilinear"),
            IMAGE,
            "Non-uniform bilinear upsampling not supported, got factors [2, 3]. Give one factor "
            "for both dimensions, or size=.",
        ),
        (
            lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
            IMAGE,
            "Bilinear upsampling with non-integer factor not supported, got 1.5. Give a whole "
            "number, or size=.",
        ),
        *[
            (
                function,
                COUNTS,
                "Bincount `minlength` must be specified and must be a constant. On the IPU MK2 "
                "platform the minimum length is also the maximum length, since shapes are fixed "
                "when the model is compiled. Got 0: give one more than the largest value.",
            )
            for function in (torch.bincount, lambda x: x.bincount(minlength=0))
        ],
        (
            lambda x: F.one_hot(x, num_classes=-1),
            CLASSES,
            "OneHot num classes must be specified and must be constant. Got -1, which torch finds "
            "out from the values: give num_classes.",
        ),
        (
            lambda x: F.ctc_loss(x, COUNTS[None, 1:], (2,), (2,), reduction="none"),
            torch.zeros(2, 1, 3),
            'CTCLoss with reduction="none" is currently not supported. Use "mean" or "sum".',
        ),
        (
            lambda x: F.ctc_loss(x, COUNTS[1:], (2,), (2,)),
            torch.zeros(2, 1, 3),
            "CTCLoss with concatenated targets is not supported: expected targets of shape "
            "(batch, length), got (2,). Pad them to one length.",
        ),
        (
            lambda x: F.nll_loss(x, CLASSES, torch.ones(3)),
            LOGITS,
            'Parameter "weight" is unsupported for aten::nll_loss_nd. Compute the loss with '
            'reduction="none", multiply it by weight[target] and pass the sum to '
            "poptorch.identity_loss.",
        ),
        (
            lambda x: torch.nn.CrossEntropyLoss(weight=torch.ones(3))(x, CLASSES),
            LOGITS,
            'Parameter "weight" is unsupported for aten::cross_entropy_loss. Compute the loss with '
            'reduction="none", multiply it by weight[target] and pass the sum to '
            "poptorch.identity_loss.",
        ),
        (
            torch.nn.Embedding(3, 2, scale_grad_by_freq=True),
            CLASSES,
            "Unsupported aten::embedding operation: scale_grad_by_freq=True. Leave it out.",
        ),
        (
            lambda x: F.embedding(x, torch.ones(3, 2), sparse=True),
            CLASSES,
            "Unsupported aten::embedding operation: sparse=True. Leave it out.",
        ),
        (
            torch.nn.EmbeddingBag(3, 2, sparse=True),
            CLASSES[None],
            "Unsupported aten::embedding_bag operation: sparse=True. Leave it out.",
        ),
        (
            torch.nn.EmbeddingBag(3, 2, padding_idx=0),
            CLASSES[None],
            "Unsupported aten::embedding_bag operation: padding_idx parameter is unsupported. "
            "Keep the row at zero yourself.",
        ),
        (
            lambda x: torch.linalg.matrix_norm(x, 2),
            LOGITS,
            "Matrix 2-norm is not supported. Use ord='fro', 1, -1, inf or -inf.",
        ),
        (
            lambda x: torch.linalg.matrix_norm(x, ord="nuc"),
            LOGITS,
            "Matrix nuclear norm is not supported. Use ord='fro', 1, -1, inf or -inf.",
        ),
        (
            torch.nn.LSTM(3, 2, num_layers=2),
            LOGITS,
            "Only LSTM with 1 layer supported. Stack several modules.",
        ),
        (
            torch.nn.LSTM(3, 2, bias=False),
            LOGITS,
            "LSTM without biases not supported. Use bias=True.",
        ),
        (
            torch.nn.LSTM(3, 2, bidirectional=True),
            LOGITS,
            "bidirectional LSTM not supported. Use two modules and flip.",
        ),
    ],
)
def test_what_a_model_for_ipus_can_not_compute_is_refused(function, given, text):
    assert refusal(function, given) == text


@pytest.mark.few
@pytest.mark.parametrize(
    ("function", "given"),
    [
        (torch.nn.Upsample(scale_factor=2, mode="nearest"), torch.ones(1, 1, 2)),
        (torch.nn.Upsample(scale_factor=3, mode="bilinear"), IMAGE),
        (torch.nn.Upsample(size=(3, 5), mode="bilinear"), IMAGE),
        (torch.nn.Upsample(scale_factor=0.5, mode="bicubic"), IMAGE),
        (torch.nn.CrossEntropyLoss(), LOGITS),
        (torch.nn.Embedding(3, 2, padding_idx=0), CLASSES),
        (lambda x: torch.linalg.matrix_norm(x), LOGITS),
        (torch.nn.GRU(3, 2, num_layers=2), LOGITS),
        (torch.nn.LSTM(3, 2), LOGITS),
    ],
)
def test_the_rest_of_these_functions_is_recorded(function, given):
    module = function

    def model(x):
        result = module(x, CLASSES) if isinstance(module, torch.nn.CrossEntropyLoss) else module(x)
        return result if isinstance(result, torch.Tensor) else result[0]

    torch.testing.assert_close(record(model, given)(given)[0], model(given).detach())


@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 2.0, 4.0]])
@pytest.mark.parametrize("as_method", [True, False])
def test_bincount_has_a_fixed_length(weights, as_method):
    weights = None if weights is None else torch.tensor(weights)

    def model(x):
        if as_method:
            return x.bincount(weights, minlength=4)
        return torch.bincount(x, weights, 4)

    x = torch.tensor([3, 1, 3, 0])
    (got,) = record(model, torch.zeros_like(x))(x)
    expected = model(x)
    assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist())
    # What is beyond is not counted, since there is no place for it.
    (got,) = record(model, x)(torch.tensor([3, 9, 3, 0]))
    kept = model(torch.tensor([3, 9, 3, 0]))[:4]
    assert got.tolist() == kept.tolist()


def test_one_hot_does_not_look_at_values():
    x = torch.tensor([[0, 2], [1, 1]])
    (got,) = record(lambda x: F.one_hot(x, 3), torch.zeros_like(x))(x)
    assert torch.equal(got, F.one_hot(x, 3))
    assert got.dtype == torch.int64


HALF = torch.float16


def near(dtype):
    return {"rtol": 2e-3, "atol": 2e-3} if dtype == HALF else {"rtol": 1e-6, "atol": 1e-6}


LAYERS = [
    (lambda x, w, b: F.linear(x, w, b), (4, 3), (2, 3), (2,)),
    (lambda x, w, b: F.linear(x, weight=w, bias=b), (4, 3), (2, 3), (2,)),
    (lambda x, w, b: F.linear(x, w), (4, 3), (2, 3), (2,)),
    (lambda x, w, b: F.conv1d(x, w, b), (2, 3, 4), (2, 3, 2), (2,)),
    (lambda x, w, b: F.conv2d(x, w, b), (2, 3, 4, 4), (2, 3, 2, 2), (2,)),
    (lambda x, w, b: F.conv3d(x, w, b), (1, 1, 3, 3, 3), (2, 1, 2, 2, 2), (2,)),
    (lambda x, w, b: F.conv_transpose1d(x, w, b), (2, 3, 4), (3, 2, 2), (2,)),
    (lambda x, w, b: F.conv_transpose2d(x, w, b), (2, 3, 4, 4), (3, 2, 2, 2), (2,)),
    (lambda x, w, b: F.conv_transpose3d(x, w, b), (1, 1, 2, 2, 2), (1, 2, 2, 2, 2), (2,)),
    (lambda x, w, b: F.layer_norm(x, (4,), w, b), (3, 4), (4,), (4,)),
    (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 3), (4,), (4,)),
    (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (5, 4), (4,), (4,)),
    (lambda x, w, b: F.instance_norm(x, None, None, w, b), (2, 4, 3), (4,), (4,)),
]


@pytest.mark.parametrize(("layer", "x", "weight", "bias"), LAYERS)
@pytest.mark.parametrize(("of_input", "of_weights"), [(HALF, torch.float32), (torch.float32, HALF)])
def test_layers_compute_in_the_type_of_their_input(layer, x, weight, bias, of_input, of_weights):
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(HALF) for shape in (x, weight, bias)
    )
    expected = layer(x.double(), weight.double(), bias.double())
    given = x.to(of_input), weight.to(of_weights), bias.to(of_weights)
    (got,) = record(layer, *given)(*given)
    assert got.dtype == of_input
    torch.testing.assert_close(got.double(), expected, **near(of_input))


def test_half_inputs_update_running_statistics_in_single_precision():
    def model(x, mean, var, weight, bias):
        y = F.batch_norm(x, mean, var, weight, bias, True, 0.25)
        return y, mean, var

    generator = torch.Generator().manual_seed(4)
    x = torch.randn(8, 3, generator=generator).to(HALF)
    mean, var, weight, bias = (torch.rand(3, generator=generator) for _ in range(4))
    recorded = record(model, x, mean, var, weight, bias, training=True)
    got = recorded(x, mean, var, weight, bias)
    expected = model(x.float(), mean.clone(), var.clone(), weight.to(HALF).float(), bias)
    assert [t.dtype for t in got] == [HALF, torch.float32, torch.float32]
    torch.testing.assert_close(got[0].float(), expected[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got[1:], list(expected[1:]), rtol=1e-6, atol=1e-6)


def test_running_statistics_in_half_stay_in_half():
    norm = torch.nn.BatchNorm1d(3).half()

    def model(x, mean, var):
        return F.batch_norm(x, mean, var, norm.weight.detach(), None, True, 0.5), mean, var

    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 6.0, 9.0]]).to(HALF)
    zero, one = torch.zeros(3, dtype=HALF), torch.ones(3, dtype=HALF)
    y, mean, var = record(model, x, zero, one, training=True)(x, zero, one)
    assert (mean.dtype, mean.tolist()) == (HALF, [1.0, 2.0, 3.0])
    assert var.tolist() == [1.5, 4.5, 9.5]
    assert torch.equal(y.sign(), torch.tensor([[-1.0] * 3, [1.0] * 3]).to(HALF))


def test_weights_stay_what_they_are_and_gradients_have_their_type():
    def step(x, w):
        w = w.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.linear(x, w).float().sum(), [w])
        return gradient

    x, w = torch.ones(2, 3, dtype=HALF), torch.ones(1, 3)
    (got,) = record(step, x, w)(x, w)
    assert (got.dtype, got.tolist()) == (torch.float32, [[2.0, 2.0, 2.0]])


def test_whole_numbers_are_not_cast():
    whole, weight = torch.ones(2, 3, dtype=torch.int32), torch.ones(1, 3)
    for func, args, kwargs in [
        (F.linear, (whole, weight), {}),
        (F.linear, (weight.half(),), {"weight": whole}),
        (torch.matmul, (weight.half(), weight), {}),
    ]:
        got_args, got_kwargs = cast(func, args, kwargs)
        assert all(a is b for a, b in zip(got_args, args))
        assert got_kwargs == kwargs


@pytest.mark.long
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_only_a_training_model_changes_running_statistics(training, half):
    """In a model for inference a layer in training mode normalises alike, and changes nothing."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.norm(x)
            return y, poptorch.identity_loss(y, "mean")

    model = Model()
    x = torch.tensor([[1.0, 2.0, 3.0], [3.0, 6.0, 9.0]])
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    wrapped = wrap(model)
    y, _ = wrapped(x.half() if half else x)
    if training:
        wrapped.copyWeightsToHost()
    assert torch.equal(y.sign().float(), torch.tensor([[-1.0] * 3, [1.0] * 3]))
    mean = torch.tensor([0.2, 0.4, 0.6] if training else [0.0] * 3)
    torch.testing.assert_close(model.norm.running_mean, mean)


@pytest.mark.parametrize("function", [torch.cumsum, torch.cumprod])
@pytest.mark.parametrize("of_input", [torch.float32, torch.int32])
@pytest.mark.parametrize("of_out", [torch.float32, torch.int32])
def test_a_running_total_has_the_type_of_out(function, of_input, of_out):
    def model(x):
        return function(x, 0, out=torch.empty(4, dtype=of_out))

    x = torch.tensor([1, 3, 2, -2]).to(of_input)
    (got,) = record(model, x)(x)
    assert got.dtype == of_out
    assert torch.equal(got, model(x))


@pytest.mark.parametrize(("of_input", "of_target"), [(HALF, torch.float32), (torch.float32, HALF)])
def test_a_squared_error_of_two_types_is_of_the_wider(of_input, of_target):
    def step(x, target):
        x = x.detach().requires_grad_()
        loss = F.mse_loss(x, target)
        return [loss.detach(), *torch.autograd.grad([loss], [x])]

    x, target = torch.tensor([1.0, 2.0]).to(of_input), torch.tensor([0.0, 4.0]).to(of_target)
    loss, gradient = record(step, x, target)(x, target)
    assert (loss.dtype, loss.item()) == (torch.float32, 2.5)
    assert (gradient.dtype, gradient.tolist()) == (of_input, [1.0, -2.0])


STEPS, STATE = torch.linspace(-1, 1, 36).reshape(6, 2, 3), torch.full((1, 2, 2), 0.5)


@pytest.mark.few
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_is_one_operator(kind):
    """However many time steps there are; with the numbers of torch's own code."""
    torch.manual_seed(0)
    layer = kind(3, 2)
    start = (STATE, STATE) if kind is torch.nn.LSTM else STATE
    counts = []
    for steps in (STEPS[:2], STEPS):
        recorded = record(lambda x: layer(x, start)[0], steps)
        counts.append(len(recorded.operators))
        assert recorded.operators.count("ipufit.recurrent.default") == 1
        # What is recorded follows nothing back, for which oneDNN has another kernel on some CPUs.
        with torch.no_grad():
            assert torch.equal(recorded(steps)[0], layer(steps, start)[0])
    assert counts[0] == counts[1]


def test_a_recurrent_layer_of_half_numbers_is_computed_step_by_step():
    """As every operator of half numbers is: in single precision, rounded once."""
    torch.manual_seed(0)
    layer, single = torch.nn.GRU(3, 2).half(), torch.nn.GRU(3, 2)
    single.load_state_dict(layer.state_dict())
    recorded = record(lambda x: layer(x, STATE.half())[0], STEPS.half())
    assert "ipufit.recurrent.default" not in recorded.operators
    wide = single(STEPS.half().float(), STATE)[0]
    # Six steps, each rounded to eleven bits.
    assert torch.allclose(recorded(STEPS.half())[0].float(), wide, atol=2e-3)
