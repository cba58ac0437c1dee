"""Executions captured whole and replayed have the numbers of those run operator by operator.

On the CPU a tape of operators stands for a CUDA graph, and the bits are the same; what runs on a
GPU is skipped by name where there is none.
"""

import copy
import itertools
import re
import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.engines.embedded.cuda_graphs import Static, check_cudagraph, keeps_its_form
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.fused_optimizers import fused_for
from ipufit.errors import NonFiniteLossError
from ipufit.optim.rules import AdamRule
from tests import fitting
from tests.fitting import Plan, assert_close, assert_equal, state_of
from tests.nets import CNN, MLP, Noise, Running, Transformer, data
from tests.points import only
from tests.reference import train
from tests.tape import Tapes
from tests.told import Executions, refused

pytestmark = pytest.mark.both_engines

X, Y = data(47)
PLANS = [Plan(4, 1), Plan(4, 3), Plan(5, 2, 2), Plan(3, 2, 2, 2), Plan(2, 3, 1, 4)]

needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HAS_KERNELS = fused_for(AdamRule({"weight_decay": 0.0}), torch.zeros(1)) is not None


@pytest.fixture(params=["tape", pytest.param("cuda", marks=needs_gpu)])
def on(request):
    """Where executions are captured."""
    return request.param


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


OPTIMIZERS = {
    "adam": adam,
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, amsgrad=True),
    "sgd": sgd,
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "lamb": lambda p: ipufit.optim.LAMB(p, 0.01, weight_decay=0.1),
}


def built(net, optimizer, jit, on, loss="cross_entropy", **options):
    """A compiled model of a copy of the network."""
    engine = EmbeddedEngine()
    net = copy.deepcopy(net)
    if on == "tape":
        engine.as_device = True
        engine.tape = Tapes() if jit != "graph" else None
    else:
        net = net.cuda()
        if isinstance(net, Running):  # a constant that is no buffer stays where it was made
            net.scale = net.scale.cuda()
    model = ipufit.Model(net, engine=lambda: engine)
    model.compile(optimizer(net.parameters()), loss, jit=jit, **options)
    return model


def fit(model, plan=PLANS[1], x=X, y=Y, epochs=3, **options):
    """Fit without a word."""
    return fitting.fit(model, x, y, plan, epochs, **options)


def captured(model):
    """Whether executions were replayed."""
    assert "Runs as CUDA graphs of whole executions" in model._session.explain()
    assert model.history.params["jit"] == "cudagraph"
    tapes = model._session.engine.tape
    return tapes is None or tapes.replays > 0


def assert_alike(on, model, other, atol=None):
    """Weights, buffers, optimizer state and history; in every bit on the CPU, unless told so."""
    atol = 1e-10 if atol is None and on == "cuda" else atol
    history, expected = model.history.history, other.history.history
    assert history.keys() == expected.keys()
    state, own = state_of(model), state_of(other)
    assert state.keys() == own.keys()
    if atol is None:
        assert history == expected
        assert_equal(model.module, other.module)
        assert all(torch.equal(value, own[key]) for key, value in state.items())
        return
    for name, values in history.items():
        assert values == pytest.approx(expected[name], abs=atol)
    assert_close(model.module, other.module, atol)
    for key, value in state.items():
        torch.testing.assert_close(value, own[key], rtol=0, atol=atol)


def pair(net, optimizer, on, atol=None, fits=1, compile_options=None, **options):
    """A model whose executions are captured, after it was held against one where none is."""
    models = []
    for jit in ("cudagraph", "graph"):
        torch.manual_seed(0)
        model = built(net, optimizer, jit, on, **(compile_options or {}))
        for _ in range(fits):
            fit(model, **{k: v() if callable(v) else v for k, v in options.items()})
        models.append(model)
    assert captured(models[0])
    assert_alike(on, *models, atol)
    return models[0]


# Every net and every plan; those that are quickly recorded, and change most, twice.
QUICK = {
    (MLP, PLANS[1]),
    (MLP, PLANS[3]),
    (CNN, PLANS[0]),
    (CNN, PLANS[2]),
    (Running, PLANS[2]),
    (Noise, PLANS[3]),
    (Transformer, PLANS[4]),
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("net", "plan"),
    only(QUICK, itertools.product((MLP, CNN, Transformer, Running, Noise), PLANS)),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_numbers_are_those_of_the_graph(net, plan, on):
    """Tails, replicas, accumulation, BatchNorm, dropout and metrics of the outputs included."""
    torch.manual_seed(1)
    model = pair(net().double(), adam, on, plan=plan, compile_options={"metrics": ["accuracy"]})
    if on == "tape":
        assert model._session.engine.tape.captures <= 3


@pytest.mark.few("tape-adam", "cuda-lamb")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_ipufit_is_captured(name, on):
    options = {
        "clip": ipufit.Clip(global_norm=0.5),
        "ema": ipufit.EMA(),
        "precision": ipufit.Precision(accumulation_dtype="float64"),
    }
    pair(MLP().double(), OPTIMIZERS[name], on, compile_options=options)


@pytest.mark.long
@pytest.mark.parametrize("net", [MLP, CNN])
def test_the_numbers_are_those_of_a_loop_written_by_hand(net, on):
    """In float64, dropout on the CPU included; a GPU draws other numbers than the loop there."""
    torch.manual_seed(1)
    net, plan = net().double(), Plan(3, 2, 2, 2)
    if on == "cuda":
        net.drop = nn.Identity()
    model = built(net, sgd, "cudagraph", on)
    history = fit(model, plan)
    by_hand = copy.deepcopy(net)
    loss = nn.functional.cross_entropy
    report = train(by_hand, sgd(by_hand.parameters()), loss, X, Y, 3, **plan.by_hand, seed=5)
    assert captured(model)
    assert history.history["loss"] == pytest.approx([mean for mean, _ in report], abs=1e-10)
    assert_close(model.module.cpu(), by_hand, 1e-10)


@pytest.mark.long
def test_two_fits_with_validation_in_between(on):
    torch.manual_seed(1)
    held_out = DataLoader(TensorDataset(X[:10], Y[:10]), batch_size=4)
    pair(CNN().double(), adam, on, fits=2, validation_data=held_out)


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "atol"), [(sgd, None), (adam, 1e-11)], ids=["sgd", "adam"])
def test_a_schedule_reaches_every_replay(optimizer, atol, on):
    """Adam's kernel takes numbers, so its rule is captured instead, which agrees to rounding."""
    model = pair(
        MLP().double(),
        optimizer,
        on,
        atol=1e-10 if on == "cuda" else atol,
        compile_options={"lr_scheduler": lambda o: ExponentialLR(o, 0.9)},
    )
    assert len(set(model.history.history["learning_rate"])) == 3


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["sgd", "adam"])
def test_a_rate_changed_between_executions_is_used(optimizer, on):
    """A constant of a graph would be the old one."""

    def changing():
        class Changing(Callback):
            def on_epoch_begin(self, epoch, logs=None):
                for group in self.model.optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + epoch // 2)

        return [Changing()]

    pair(MLP().double(), optimizer, on, epochs=4, callbacks=changing)


def test_numbers_that_change_with_every_execution_are_never_captured():
    """What comes once is not worth a capture; it runs as it was recorded."""

    class Changing(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.param_groups[0]["lr"] *= 0.9

    net, models = MLP().double(), []
    for jit in ("cudagraph", "graph"):
        models.append(built(net, adam, jit, "tape"))
        fit(models[-1], callbacks=[Changing()])
    assert_alike("tape", *models)
    # Where there are no kernels, hyper-parameters are no constants.
    assert (models[0]._session.engine.tape.captures == 0) == HAS_KERNELS


class Scaled(nn.Module):
    """A gradient that is the sample, a buffer that counts, and a value that is logged."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        ipufit.log("mean", self.w.mean(), on_update=True)
        return self.w * x


def linear(prediction, target):
    return (prediction * target).mean()


@pytest.mark.few
@pytest.mark.parametrize(
    ("places", "value", "every", "initial"),
    [
        pytest.param(
            *(places, value, every, initial),
            marks=() if initial == quick else pytest.mark.long,
            id=f"{name}, {initial:g}",
        )
        for name, places, value, every, quick in (
            ("replayed", [3], 1e36, 5, 1024.0),
            ("later", [16], 1e36, 5, 1000.0),
            ("after the scale has grown", [10], 1e35, None, 1024.0),
            ("all of the first execution", [0, 1, 2], 1e38, None, 1000.0),
        )
        for initial in (1024.0, 1000.0)
    ],
)
def test_updates_that_overflow_are_left_out(places, value, every, initial, on):
    """The replay is taken back. The scale grows within executions, and is no constant of them."""
    x = torch.linspace(0.5, 1.5, 24).unsqueeze(1)
    x[places] = value
    models = []
    for jit in ("cudagraph", "graph"):
        scale = ipufit.LossScale(initial, 5)
        options = {
            "precision": ipufit.Precision(loss_scale=scale),
            "ema": ipufit.EMA(overwrite_frequency=every),
        }
        model = built(Scaled(), sgd, jit, on, linear, **options)
        fit(model, Plan(1, 3), x, torch.ones(24, 1), epochs=3 if every else 1)
        models.append(model)
    assert captured(models[0])
    assert models[0].history.history["skipped_updates"][0] == len(places)
    assert_alike(on, *models)


@pytest.mark.long
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_training_before_its_update(value, on):
    """The state is that from before the update, though its execution was replayed."""
    x = X.clone()
    x[28] = value  # of update 7, in the third execution
    net, models, texts = MLP().double(), [], []
    for jit in ("cudagraph", "graph"):
        model = built(net, adam, jit, on)
        fit(model, epochs=1)
        with pytest.raises(NonFiniteLossError) as caught:
            fit(model, x=x)
        texts.append(str(caught.value))
        models.append(model)
    assert texts[0] == texts[1]
    assert "in update 19" in texts[0]
    assert captured(models[0])
    assert_alike(on, *models)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"outputs": "final"},
        {"outputs": "sum"},
        {"outputs": ipufit.Outputs("every_n", 3)},
    ],
    ids=str,
)
def test_outputs_come_back(options, on):
    """Kept from one execution to the next, as a callback may."""

    def kept():
        class Kept(Callback):
            def __init__(self):
                self.outputs = []

            def on_train_outputs(self, outputs):
                self.outputs.append(outputs)

        return [Kept()]

    pair(MLP().double(), adam, on, compile_options=options, callbacks=kept)


@pytest.mark.long
def test_what_callbacks_write_is_used(on):
    """Weights and buffers in place or by other memory, and a state of the optimizer."""

    def writing():
        class Writing(Callback):
            def on_train_batch_end(self, batch, logs=None):
                net = self.model.module
                with torch.no_grad():
                    if batch == 5:
                        net.head.weight.mul_(0.5)
                        net.norm.running_mean.add_(0.1)
                    if batch == 8:
                        net.head.bias.data = torch.ones_like(net.head.bias)
                        net.norm.running_var.data = torch.ones_like(net.norm.running_var)

            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    optimizer = self.model.optimizer
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        return [Writing()]

    torch.manual_seed(1)
    pair(CNN().double(), adam, on, epochs=4, callbacks=writing)


def test_an_execution_that_fails_while_the_host_waits_is_taken_back():
    """As one that fails anywhere else."""
    model = built(CNN().double(), adam, "cudagraph", "tape")
    fit(model)
    replays = model._session.engine.tape.replays
    before = copy.deepcopy(model.module.state_dict())
    start, calls = model._session.engine.transfer.start, []

    def failing(packed):
        calls.append(packed)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return start(packed)

    model._session.engine.transfer.start = failing
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    tape = model._session.engine.tape
    assert (len(calls), tape.replays) == (2, replays + 2)
    # One execution as recorded, one replayed; the second replay never was.
    assert int(model.optimizer.state[model.module.head.weight]["step"]) == 36 + 6
    assert not all(torch.equal(v, before[k]) for k, v in model.module.state_dict().items())


@pytest.mark.long
def test_one_copy_comes_back_per_execution(on):
    counted = Executions()
    model = built(MLP().double(), adam, "cudagraph", on, metrics=["accuracy"])
    fit(model, callbacks=[counted])
    assert captured(model)
    assert model._session.engine.transfer.count == counted.count == 12


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_are_sent_ahead(prefetch, on, monkeypatch):
    """Once an execution like theirs has been captured, by the thread that prepares them."""
    sent = []

    def send(self, values):
        sent.append(threading.current_thread().name)
        return original(self, values)

    def receive(self, values):
        received.append(values)
        receives(self, values)

    original, receives, received = Static.send, Static.receive, []
    monkeypatch.setattr(Static, "send", send)
    monkeypatch.setattr(Static, "receive", receive)
    pair(MLP().double(), adam, on, loading=ipufit.Loading(prefetch=prefetch))
    # Of 9 full executions and 3 tails, those prepared after the captures of the second of each.
    threads = {"ipufit-prefetch"} if prefetch else {threading.current_thread().name}
    assert set(sent) == threads
    assert len(received) == len(sent)
    assert len(sent) == 8 if prefetch == 0 else 4 <= len(sent) <= 8


@pytest.mark.long
def test_samples_sent_to_memory_that_was_given_up_are_copied_again():
    """A callback has made another state of the optimizer in between: all is captured anew."""

    def loading():
        class Loading(Callback):
            def on_epoch_end(self, epoch, logs=None):
                optimizer = self.model.optimizer
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        return [Loading()]

    model = pair(
        MLP().double(),
        adam,
        "tape",
        callbacks=loading,
        loading=ipufit.Loading(prefetch=2),
        plan=Plan(2, 2),
    )
    assert model._session.engine.tape.captures >= 3


@pytest.mark.long
def test_auto_captures(on):
    model = built(MLP().double(), adam, "auto", on)
    fit(model)
    assert captured(model)


@pytest.mark.long
@pytest.mark.parametrize("plan", [Plan(2, 3, 4), Plan(2, 2, 2, 2)], ids=str)
def test_micro_batches_of_an_update_are_captured_as_one_batch(plan, on):
    """Under "auto", which promises the numbers of the graph up to the order of summation."""
    net, models = MLP().double(), []
    for jit in ("auto", "graph"):
        models.append(built(net, adam, jit, on))
        fit(models[-1], plan)
    assert captured(models[0])
    count = plan.ga * plan.replicas
    size = count * plan.mb
    assert (
        f"The {count} micro-batches of an update run as one batch of {size} samples."
    ) in models[0]._session.explain()
    assert_alike(on, *models, atol=1e-10)


class OwnStep(torch.optim.SGD):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"optimizer": lambda p: OwnStep(p, 0.1)},
            "the step of OwnStep is torch's own, which counts steps on the host",
        ),
        (
            {"memory": ipufit.Memory(offload_optimizer=True)},
            "the optimizer's state is in host memory between updates",
        ),
        (
            {"precision": ipufit.Precision(accumulation_dtype="float16", loss_scale=8.0)},
            "a loss scale in a tensor rounds a half-precision gradient differently",
        ),
    ],
)
def test_what_does_not_fit_runs_as_recorded_and_says_why(change, reason):
    optimizer = change.pop("optimizer", adam)
    model = built(MLP().double(), optimizer, "cudagraph", "tape", **change)
    text = f"jit='cudagraph' runs this program as jit='graph' does: {reason}."
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        fit(model, x=X[:24], y=Y[:24])
    assert f"Runs no CUDA graphs: {reason}." in model._session.explain()
    assert model._session.engine.tape.captures == 0
    same = built(MLP().double(), optimizer, "auto", "tape", **change)
    fit(same, x=X[:24], y=Y[:24])
    assert reason in same._session.explain()


def test_samples_with_gaps_run_as_recorded():
    """A copy of them has other strides than what was recorded."""
    model = built(MLP().double(), adam, "auto", "tape")
    wide = torch.randn(24, 1, 3, 8, dtype=torch.float64)

    batches = [(wide[i : i + 4, :, :, ::2], Y[i : i + 4]) for i in range(0, 24, 4)]
    model.fit(batches, epochs=3, verbose=0)
    assert "the samples are not contiguous in memory, but their copy is" in model._session.explain()


def test_what_torch_cannot_capture_runs_as_recorded():
    """Nothing was done by then, and nothing is lost."""
    net, models = CNN().double(), []
    for jit in ("auto", "graph"):
        model = built(net, adam, jit, "tape")
        if jit == "auto":
            model._session.engine.tape = Tapes(refused=[torch.ops.aten.relu.default])
        fit(model)
        models.append(model)
    assert_alike("tape", *models)
    reason = "torch can't capture it: operation not permitted when stream is capturing"
    assert reason in models[0]._session.explain()
    assert models[0]._session.engine.tape.captures == 0


def test_a_module_on_the_cpu_is_refused():
    text = (
        "jit='cudagraph' needs a module on a CUDA device, but MLP is on cpu. Move it with "
        "module.cuda(), or use jit='auto'."
    )
    model = ipufit.Model(MLP(), engine="embedded")
    refused(lambda: model.compile("adam", "cross_entropy", jit="cudagraph"), text)


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    text = (
        f"jit='cudagraph' can't work here: CUDA graphs of torch {torch.__version__} can't have "
        "their own random generators. Use jit='auto', or a newer torch."
    )
    refused(lambda: check_cudagraph(nn.Identity()), text)


def test_static_memory_has_the_form_of_what_is_put_there():
    """Every tensor begins at a multiple of 512 bytes, whatever its dtype."""
    values = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(0, 3),
        torch.randn(3, 4)[:, 1:3],
    ]
    static = Static(values, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in static.tensors]
    for _ in range(2):
        static.fill(values)
        for tensor, value in zip(static.tensors, values):
            assert torch.equal(tensor, value)
            assert tensor.dtype == value.dtype
            assert tensor.stride() == torch.empty_like(value).stride()
        values = [value.clone().zero_() for value in values]
    assert [tensor.data_ptr() for tensor in static.tensors] == addresses
    filled = [address for address, value in zip(addresses, values) if value.numel()]
    assert all((address - filled[0]) % 512 == 0 for address in filled)
    assert all(keeps_its_form(value, torch.device("cpu")) for value in values)
    assert not keeps_its_form(torch.randn(3, 4)[:, 1:3], torch.device("cpu"))


def test_a_tape_does_nothing_until_it_is_replayed():
    """And reads memory, not values, which must not be freed."""
    given, kept = [torch.ones(3)], []

    def work(draw):
        given[0].add_(1)
        draw(0, 7)
        kept.append(given[0] * 2 + torch.rand(3))

    tape = Tapes().capture(work, 1)
    assert given[0].tolist() == [1, 1, 1]
    torch.manual_seed(9)
    expected = torch.rand(3)
    for round in (2, 3):
        tape.replay([9])
        assert given[0].tolist() == [round] * 3
        assert torch.equal(kept[0], given[0] * 2 + expected)
    given.clear()
    with pytest.raises(AssertionError, match="memory that has been freed"):
        tape.replay([9])


def test_a_tape_gives_the_host_no_value():
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Tapes().capture(lambda draw: bool(torch.ones(1) + 1), 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_within_an_execution_the_host_waits_for_nothing():
    """A captured one is run again with every wait for the device an error, but the last one."""
    model = built(CNN(), adam, "cudagraph", "cuda", metrics=["accuracy"])

    class Watching(Callback):
        last = False

        def on_epoch_begin(self, epoch, logs=None):
            self.last = epoch == 2

        def on_train_batch_begin(self, batch, logs=None):
            torch.cuda.set_sync_debug_mode("error" if self.last else "default")

        def on_train_batch_end(self, batch, logs=None):
            torch.cuda.set_sync_debug_mode("default")

    try:
        fit(model, x=X[:36].float(), y=Y[:36], callbacks=[Watching()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert captured(model)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_failed_capture_leaves_the_stream_alone():
    from ipufit.engines.embedded.cuda_graphs import CudaGraphs

    device = torch.device("cuda", torch.cuda.current_device())
    outside = torch.cuda.current_stream()
    value = torch.ones(1, device=device)
    with pytest.raises(RuntimeError):
        CudaGraphs(device).capture(lambda draw: value.item(), 0)
    assert torch.cuda.current_stream() == outside
    assert value.item() == 1
    assert torch.rand(3, device=device).shape == (3,)
