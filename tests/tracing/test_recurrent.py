"""Recurrent layers: one operator each in what is recorded, with the numbers of torch's own code."""

import copy
import pathlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ipufit
from ipufit import poptorch
from ipufit.errors import DataError
from ipufit.tracing.recurrent import BACKWARD, FORWARD
from tests.engines import embedded_only, runs_eagerly
from tests.fitting import Plan, assert_close, assert_equal, compiled, fit
from tests.reference import train

one_layer = embedded_only("PopTorch has recurrent layers of one layer and direction alone")
recorded_here = embedded_only("what PopTorch records is not looked into")
takes_steps = embedded_only("PopTorch differentiates once")

# Rounding in another order, in float64.
TOLERANCE = 1e-12

FEATURES, HIDDEN, CLASSES, STEPS = 5, 6, 3, 4


def relu_rnn(*args, **kwargs):
    """The other nonlinearity of nn.RNN."""
    return nn.RNN(*args, nonlinearity="relu", **kwargs)


KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": relu_rnn}


def sequences(count=24, dtype=torch.float64, steps=STEPS):
    """Sequences and classes; as many as need no smaller micro-batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, steps, FEATURES, generator=generator, dtype=dtype)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


class Reader(nn.Module):
    """A layer over sequences (batch, time, features), of which output and last states are read."""

    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.layer = KINDS[kind](FEATURES, HIDDEN, **options)
        width = options.get("proj_size") or HIDDEN
        self.head = nn.Linear(width * (2 if self.layer.bidirectional else 1), CLASSES)
        self.other = nn.Linear(width, CLASSES)

    def read(self, x):
        """The output (batch, time, features) and the last hidden state."""
        first = self.layer.batch_first
        output, last = self.layer(x if first else x.transpose(0, 1))
        hidden = last[0] if isinstance(last, tuple) else last
        return output if first else output.transpose(0, 1), hidden

    def forward(self, x):
        output, hidden = self.read(torch.tanh(self.embed(x)))
        return self.head(output.mean(1)) + self.other(hidden.mean(0))


def step_by_hand(layer, x, state, names):
    """One time step of one direction, from the equations in torch's documentation."""
    weights = [getattr(layer, name) for name in names]
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    given, kept = x @ w_ih.t() + b_ih, state[0] @ w_hh.t() + b_hh
    if layer.mode == "LSTM":
        i, f, g, o = (given + kept).chunk(4, 1)
        cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell
    if layer.mode == "GRU":
        (ri, zi, ni), (rh, zh, nh) = given.chunk(3, 1), kept.chunk(3, 1)
        r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
        return ((1 - z) * (ni + r * nh).tanh() + z * state[0],)
    return ((given + kept).tanh() if layer.mode == "RNN_TANH" else (given + kept).relu(),)


class ByHand(Reader):
    """The same numbers, computed time step by time step."""

    def read(self, x):
        layer, hidden = self.layer, []
        for number in range(layer.num_layers):
            outputs = []
            for suffix in ("", "_reverse") if layer.bidirectional else ("",):
                names = [
                    f"{name}_l{number}{suffix}"
                    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                ]
                state = (x.new_zeros(len(x), HIDDEN),) * 2
                steps = range(x.shape[1])
                found = {}
                for place in reversed(steps) if suffix else steps:
                    state = step_by_hand(layer, x[:, place], state, names)
                    found[place] = state[0]
                outputs.append(torch.stack([found[place] for place in steps], 1))
                hidden.append(state[0])
            x = torch.cat(outputs, 2)
        return x, torch.stack(hidden)


def made(kind, net=Reader, dtype=torch.float64, **options):
    """With the same weights every time."""
    torch.manual_seed(1)
    return net(kind, **options).to(dtype)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def at_length(*values, marks=()):
    """A point that shows what others do, of another kind."""
    return pytest.param(*values, marks=[marks, pytest.mark.long] if marks else pytest.mark.long)


BOTH = {"bidirectional": True}
TWO = {"num_layers": 2}
POINTS = [
    ("lstm", {}),
    at_length("gru", {}),
    ("rnn_tanh", {}),
    at_length("rnn_relu", {}),
    at_length("lstm", {"batch_first": True}),
    ("gru", {"batch_first": True}),
    pytest.param("lstm", {**BOTH, **TWO}, marks=one_layer),
    at_length("gru", {**BOTH, **TWO, "batch_first": True}, marks=one_layer),
    at_length("gru", BOTH, marks=one_layer),
    at_length("rnn_tanh", {**BOTH, "batch_first": True}, marks=one_layer),
    pytest.param("rnn_relu", TWO, marks=one_layer),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), POINTS, ids=str)
def test_training_equals_a_loop_over_time_steps(kind, options):
    """Weights and losses of a plain loop, over replicas and accumulation, tails included."""
    x, y = sequences(23)
    plan = Plan(3, 2, 2, 2)
    model, _ = compiled(made(kind, **options), sgd)
    history = fit(model, x, y, plan)
    expected = made(kind, ByHand, **options)
    loss = functional.cross_entropy
    report = train(expected, sgd(expected.parameters()), loss, x, y, epochs=2, **plan.by_hand)
    assert_close(model.module, expected, TOLERANCE)
    losses = [mean for mean, _ in report]
    assert history.history["loss"] == pytest.approx(losses, abs=TOLERANCE)


WAYS = [{"jit": "graph"}, {"way": "eager"}]
DROPPING = {"num_layers": 2, "dropout": 0.4}
EAGER_POINTS = [
    at_length("lstm", torch.float32, {}),
    ("lstm", torch.float32, {**DROPPING, "bidirectional": True}),
    at_length("lstm", torch.float64, DROPPING),
    ("lstm", torch.float64, {"proj_size": 3, "bias": False}),
    at_length("gru", torch.float32, DROPPING),
    ("gru", torch.float64, {"bidirectional": True, "batch_first": True}),
    ("rnn_tanh", torch.float32, {"bidirectional": True, "num_layers": 2}),
    at_length("rnn_relu", torch.float64, DROPPING),
]


@pytest.mark.few(
    "lstm-torch.float32-{'num_layers': 2, 'dropout': 0.4, 'bidirectional': True}",
    "lstm-torch.float64-{'proj_size': 3, 'bias': False}",
)
@runs_eagerly
@pytest.mark.parametrize(("kind", "dtype", "options"), EAGER_POINTS, ids=str)
def test_the_bits_are_those_of_the_module_itself(kind, dtype, options):
    """Of training, with its random numbers, of evaluation and of predictions."""
    x, y = sequences(dtype=dtype)
    results = []
    for way in WAYS:
        model, _ = compiled(made(kind, dtype=dtype, **options), "adam", **way)
        losses = fit(model, x, y, Plan(4, 2, 2)).history["loss"]
        seen = torch.as_tensor(model.predict(x, batch_size=4, verbose=0))
        results.append((model.module, losses, model.evaluate(x, y, batch_size=4, verbose=0), seen))
    assert_equal(results[0][0], results[1][0])
    assert results[0][1:3] == results[1][1:3]
    assert torch.equal(results[0][3], results[1][3])


@pytest.mark.few("rnn_tanh-{'num_layers': 2, 'dropout': 0.4}")
@runs_eagerly
@pytest.mark.parametrize("options", [{}, DROPPING], ids=str)
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh"])
def test_the_bits_are_those_of_the_module_in_mixed_precision(kind, options):
    """Autocast computes some of torch's layers in bfloat16 as a whole, and parts of others."""
    x, y = sequences(dtype=torch.float32)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            made(kind, dtype=torch.float32)(x[:4]).sum().backward()
    except RuntimeError as error:
        if str(error) != "could not create a primitive descriptor":
            raise
        pytest.skip("torch itself has no kernel of this layer for this CPU")
    models = []
    for way in WAYS:
        net = made(kind, dtype=torch.float32, **options)
        model, _ = compiled(net, "adam", precision="mixed_bfloat16", **way)
        fit(model, x, y, Plan(4, 2, 2))
        models.append(model.module)
    assert_equal(*models)


@pytest.mark.long
@one_layer
def test_dropout_between_layers_does_not_depend_on_device_iterations():
    """Nor on where a run was interrupted."""
    x, y = sequences(20)
    nets = []
    for iterations, ends in ((1, (2,)), (3, (2,)), (2, (1, 2))):
        model, _ = compiled(made("gru", **DROPPING), "adam")
        begin = 0
        for end in ends:
            fit(model, x, y, Plan(4, iterations), epochs=range(begin, end))
            begin = end
        nets.append(model.module)
    assert_equal(nets[0], nets[1])
    assert_equal(nets[0], nets[2])
    # In evaluation nothing is dropped.
    model, _ = compiled(made("gru", **DROPPING), "adam")
    whole, _ = compiled(made("gru", num_layers=2), "adam")
    assert model.evaluate(x, y, verbose=0) == whole.evaluate(x, y, verbose=0)


def recorded_by(model):
    """The graphs of a model that has trained and predicted."""
    graphs = [each.graph for each in model._session.engine._traced.values()]
    return [list(graph.graph.nodes) for graph in graphs]


@pytest.mark.long
def test_a_recording_may_set_flags_that_torch_has_closed(monkeypatch):
    """As they are when torch.testing._internal.common_utils has been imported."""
    module = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(module, "__allow_nonbracketed_mutation_flag", False)
    before = torch.backends.mkldnn.enabled
    model = ipufit.Model(Reader("lstm").double())
    model.compile("sgd", "cross_entropy")
    assert fit(model, *sequences()).epoch == [0, 1]
    assert torch.backends.mkldnn.enabled is before
    assert torch.backends.flags_frozen()


@pytest.mark.few("lstm")
@recorded_here
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_does_not_grow_with_the_time_steps(kind):
    """Whole layers, forward and backward, so that a long sequence starts as soon as a short one."""
    counts = []
    for steps in (2, 50):
        x, y = sequences(8, steps=steps)
        model, _ = compiled(made(kind, num_layers=2, bidirectional=True), "sgd")
        fit(model, x, y, Plan(4), epochs=1)
        model.predict(x, batch_size=4, verbose=0)
        training, prediction = recorded_by(model)
        for target, wanted in ((FORWARD, 1), (BACKWARD, 1)):
            assert sum(node.target is target for node in training) == wanted
        assert sum(node.target is FORWARD for node in prediction) == 1
        counts.append((len(training), len(prediction)))
    assert counts[0] == counts[1]


class Starting(Reader):
    """Begins with a state that is learned, and goes on with the state of another call."""

    def __init__(self, kind):
        super().__init__(kind)
        self.start = nn.Parameter(torch.linspace(-1.0, 1.0, HIDDEN))

    def read(self, x):
        start = self.start.expand(1, len(x), HIDDEN).contiguous()
        is_lstm = isinstance(self.layer, nn.LSTM)
        _, last = self.layer(x.transpose(0, 1), (start, start * 2) if is_lstm else start)
        output, last = self.layer(x.transpose(0, 1), last)
        return output.transpose(0, 1), last[0] if is_lstm else last


class StartingByHand(Starting):
    """The same time step by time step."""

    def read(self, x):
        start = self.start.expand(len(x), HIDDEN)
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        state, outputs = (start, start * 2), []
        for step in (*range(x.shape[1]),) * 2:
            state = step_by_hand(self.layer, x[:, step], state, names)
            outputs.append(state[0])
        return torch.stack(outputs[x.shape[1] :], 1), state[0].unsqueeze(0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_are_given_learned_and_handed_on(kind):
    """Gradients go to initial states and through last ones; one layer may be called twice."""
    x, y = sequences()
    model, _ = compiled(made(kind, Starting), sgd)
    fit(model, x, y, Plan(4, 2))
    expected = made(kind, StartingByHand)
    loss = functional.cross_entropy
    train(expected, sgd(expected.parameters()), loss, x, y, epochs=2, mb=4)
    assert_close(model.module, expected, TOLERANCE)


@pytest.mark.long
@pytest.mark.both_engines
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_compiled_file_holds_whole_layers(kind, tmp_path):
    """The stand-in's programs, which go on from a file with the same numbers."""
    path = str(tmp_path / "reader.poptorch")
    x, y = sequences(8, dtype=torch.float32)
    results = []
    for loads in (False, True):
        net = WithLoss(made(kind, dtype=torch.float32))
        options = poptorch.Options().showCompilationProgressBar(False)
        trainer = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
        if loads:
            trainer.loadExecutable(path)
        else:
            trainer.compileAndExport(path, x, y, export_model=False)
            assert b"ipufit.recurrent.default" in pathlib.Path(path).read_bytes()
        results.append([trainer(x, y)[1] for _ in range(3)])
    assert results[0] == results[1]
    assert results[0][0] > results[0][2]


class WithLoss(nn.Module):
    """A net with its loss, as PopTorch has it."""

    def __init__(self, net):
        super().__init__()
        self.net, self.loss = net, nn.CrossEntropyLoss()

    def forward(self, x, y):
        output = self.net(x)
        return output, self.loss(output, y)


@pytest.mark.long
@recorded_here
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_merge(kind):
    """A layer keeps the samples of a batch apart, whichever dimension they are in."""
    x, y = sequences(24)
    nets = []
    for jit in ("kernels", "graph"):
        net = made(kind, bidirectional=True, batch_first=True)
        model, engine = compiled(net, sgd, jit=jit)
        fit(model, x, y, Plan(2, 1, 3, 2))
        if jit == "kernels":
            said = "The 6 micro-batches of an update run as one batch of 12 samples."
            assert engine.training.merging.explanation == said
        nets.append(model.module)
    # The larger batch sums up in another order.
    assert_close(nets[0], nets[1], 1e-10)


@pytest.mark.long
@recorded_here
def test_micro_batches_with_dropout_between_sub_layers_stay_apart():
    """Each of them has random numbers of its own."""
    x, y = sequences(24)
    model, engine = compiled(made("lstm", **DROPPING), sgd)
    fit(model, x, y, Plan(2, 1, 3, 2))
    assert engine.training.merging.explanation == (
        "The 6 micro-batches of an update run one by one: aten.bernoulli_.float draws random "
        "numbers, other ones in each micro-batch."
    )


class Tangled(nn.Module):
    """Samples become time steps, of which one sees the other."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x)[0].mean(1))


@pytest.mark.long
@recorded_here
def test_samples_along_the_time_steps_are_not_merged():
    """There a layer joins them."""
    x, y = sequences(24)
    torch.manual_seed(1)
    model, engine = compiled(Tangled().double(), sgd)
    fit(model, x, y, Plan(2, 1, 3, 2))
    assert engine.training.merging.explanation == (
        "The 6 micro-batches of an update run one by one: ipufit.recurrent in forward joins the "
        "samples of a batch."
    )


class Penalised(nn.Module):
    """The loss has the gradient of the output with respect to the input in it."""

    def __init__(self, kind):
        super().__init__()
        self.net = Reader(kind)

    def forward(self, x, y):
        x = x.detach().requires_grad_()
        output = self.net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output, functional.cross_entropy(output, y) + slope.square().sum()


@takes_steps
@pytest.mark.parametrize("kind", [at_length("lstm"), "gru"])
def test_gradients_of_gradients_are_recorded_by_time_steps(kind):
    """Only the operators of the time steps have them."""
    x, y = sequences(8, steps=2)
    torch.manual_seed(1)
    net = Penalised(kind).double()
    expected = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(sgd(net.parameters()), None)
    model.fit({"x": x, "y": y}, batch_size=4, shuffle=False, verbose=0)
    optimizer = sgd(expected.parameters())
    for begin in range(0, len(x), 4):
        optimizer.zero_grad()
        expected(x[begin : begin + 4], y[begin : begin + 4])[1].backward()
        optimizer.step()
    assert_close(net, expected, TOLERANCE)


class Checkpointed(Reader):
    """What the layer keeps is computed again."""

    def read(self, x):
        return checkpoint(super().read, x, use_reentrant=False)


class Copied(Reader):
    """What is kept for the gradients is kept as copies."""

    def read(self, x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return super().read(x)


@pytest.mark.long
@recorded_here
@pytest.mark.parametrize(("net", "calls"), [(Checkpointed, 2), (Copied, 1)])
def test_layers_work_under_hooks_for_saved_tensors(net, calls):
    """A checkpoint computes the layer twice; the numbers are those without."""
    x, y = sequences(8)
    model, _ = compiled(made("gru", net), sgd, jit="graph")
    fit(model, x, y, Plan(4))
    plain, _ = compiled(made("gru"), sgd, jit="graph")
    fit(plain, x, y, Plan(4))
    assert_equal(model.module, plain.module)
    for nodes in recorded_by(model):
        assert sum(node.target is FORWARD for node in nodes) == calls


@pytest.mark.long
@recorded_here
def test_frozen_layers_keep_nothing_for_a_gradient():
    """The gradient goes on through the layer where something before it learns, and else ends."""
    x, y = sequences(8)
    for before, wanted in ((True, ([0], True)), (False, ([], False))):
        net = made("lstm")
        net.layer.requires_grad_(False)
        net.embed.requires_grad_(before)
        start = copy.deepcopy(net.layer.state_dict())
        model, _ = compiled(net, lambda p: sgd([each for each in p if each.requires_grad]))
        fit(model, x, y, Plan(4))
        assert all(torch.equal(start[k], v) for k, v in model.module.layer.state_dict().items())
        (forward,) = (n for n in recorded_by(model)[0] if n.target is FORWARD)
        assert forward.args[-2:] == wanted


@pytest.mark.long
def test_torch_is_as_it_was_behind_a_recording():
    """Its functions are others only while something is recorded, in that thread."""
    names = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    before = [getattr(torch, name) for name in names]
    x, y = sequences()
    model, _ = compiled(made("lstm"), sgd)
    fit(model, x, y, Plan(4), epochs=1)
    assert [getattr(torch, name) for name in names] == before
    assert [getattr(torch._VF, name) for name in names] == before
    assert torch._C._get_mkldnn_enabled()


class Direct(nn.Module):
    """Calls torch's function itself, with the shape of a state."""

    def __init__(self, *shape):
        super().__init__()
        self.layer, self.shape = nn.GRU(FEATURES, HIDDEN), shape

    def forward(self, x):
        weights = [weight for _, weight in self.layer.named_parameters()]
        start = torch.zeros(self.shape)
        return torch.gru(x, start, weights, True, 1, 0.0, True, False, batch_first=True)[0]


@pytest.mark.long
@recorded_here
def test_shapes_that_do_not_fit_are_named_before_anything_runs():
    """By what torch's own function says of them, as of any other function."""
    x, y = torch.zeros(4, STEPS, FEATURES), torch.zeros(4, STEPS, HIDDEN)
    model = ipufit.Model(Direct(1, 2, HIDDEN))
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=2, verbose=0)
    model = ipufit.Model(Direct(1, 2, HIDDEN + 1))
    model.compile("sgd", "mse")
    with pytest.raises(DataError, match="gru in Direct needs shapes that fit together"):
        model.fit(x, y, batch_size=2, verbose=0)
