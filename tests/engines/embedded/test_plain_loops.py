"""Whatever a loop written by hand trains: eagerly to the same numbers, and by itself in "auto"."""

import contextlib
import copy
import functools
import random
import types
import warnings

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.errors import CaptureError, LossError
from tests.engines import runs_eagerly

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(44, 6, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (44,), generator=GENERATOR)


def loader():
    """Batches of eight, the last one of four."""
    return DataLoader(TensorDataset(X, Y), batch_size=8)


class Net(nn.Module):
    """Two layers, between which a subclass puts what no recording takes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def between(self, x):
        raise NotImplementedError

    def forward(self, x):
        return self.last(self.between(self.first(x).tanh()))


class Masked(Net):
    """Rows and elements chosen by their values."""

    def between(self, x):
        rows = x[:, 0].nonzero().squeeze(1)
        return x.clone().index_add(0, rows, x[rows]) + x[x > 0].mean() + x.sum().item()


class LayerDrop(Net):
    """Layers that a sum over the batch leaves out: their gradients are None in turn."""

    def __init__(self, modulus=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()
        self.modulus = modulus

    def between(self, x):
        left_out = int(x.detach().abs().sum() * 97) % self.modulus
        for i, layer in enumerate(self.layers):
            if i != left_out:
                x = x + layer(x).tanh()
        return x


class Experts(Net):
    """Each sample goes to the expert that a gate chooses."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4).double()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()

    def between(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0]
            if len(rows):
                result[rows] = expert(x[rows]) * weights[rows, None]
        return result


class Packed(Net):
    """A packed sequence of sequences whose lengths are values."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(1, 6, batch_first=True).double()

    def between(self, x):
        lengths = (x[:, 0].abs() * 5).long() + 1
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, True, False)
        return self.cell(packed)[1][-1]


class Averaged(Net):
    """Statistics as a plain mean over all batches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=None).double()

    def between(self, x):
        return self.norm(x)


class Assigned(Net):
    """Puts another tensor in the place of its buffer, and makes one on the way."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, dtype=torch.float64))

    def between(self, x):
        self.seen = 0.9 * self.seen + x.detach().mean(0)
        self.register_buffer("latest", x.detach()[0], persistent=False)
        return x - self.seen


class Reentrant(Net):
    """Checkpointing as it was at first."""

    def between(self, x):
        return checkpoint(torch.sin, x, use_reentrant=True)


class Outside(Net):
    """Parameters that are reached by a list from before."""

    def __init__(self):
        super().__init__()
        self.penalised = tuple(self.parameters())

    def between(self, x):
        return x + sum(p.square().sum() for p in self.penalised)


class Hooked(Net):
    """Bounds a gradient once it is in ``.grad``."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(self.bound)

    @staticmethod
    def bound(parameter):
        parameter.grad.clamp_(-0.01, 0.01)

    def between(self, x):
        return x


class Sparse(nn.Module):
    """Embeddings whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        return self.last(self.words((x.abs() * 7).long().clamp(max=19)).mean(1))


ANNEALED = ("number", "list", "tensor", "kept object", "hook")


class Annealed(Net):
    """Counts micro-batches in a number, a list, a tensor, an object and a hook."""

    def __init__(self, how):
        super().__init__()
        self.how, self.step, self.steps = how, 0, [0]
        self.tensor, self.kept = torch.zeros(()), types.SimpleNamespace(step=0)
        if how == "hook":
            self.last.register_full_backward_hook(self.shrink)

    def count(self):
        if self.how == "number":
            self.step += 1
            return self.step
        if self.how == "list":
            self.steps[0] += 1
            return self.steps[0]
        if self.how == "tensor":
            self.tensor += 1
            return self.tensor
        self.kept.step += 1
        return self.kept.step

    def shrink(self, layer, received, given):
        self.step += 1
        return tuple(gradient * 0.9**self.step for gradient in received)

    def between(self, x):
        return x if self.how == "hook" else x * (1 - 0.9 ** self.count())


class Queued(Net):
    """Compares with earlier micro-batches: a buffer with a place, tensors in a list, a view."""

    def __init__(self, how):
        super().__init__()
        self.how, self.place = how, 0
        self.register_buffer("queue", torch.zeros(16, 6, dtype=torch.float64))
        self.tensors = [torch.ones(6, dtype=torch.float64)] * 3

    def between(self, x):
        latest = x.detach().mean(0)
        if self.how == "list":
            x = x + torch.stack(self.tensors).mean(0)
            self.tensors = [*self.tensors[1:], latest]
        elif self.how == "view":
            x = x + self.tensors[0]
            self.tensors[0][1:3] = latest[1:3]
        else:
            x = x + self.queue.mean(0)
            self.queue[self.place] = latest
            self.place = (self.place + 1) % 16
        return x


class Initialised(Net):
    """Takes its scale from the first micro-batch."""

    is_ready = False

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def between(self, x):
        if not self.is_ready:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_ready = True
        return x * self.scale


class Followed(Net):
    """Moves a teacher that is no part of the module."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(6, 6).double().requires_grad_(False)]

    def between(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.hidden[0].parameters(), self.first.parameters()):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return x + self.hidden[0](x)


class Again(Net):
    """Checkpoints a layer whose buffers change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).double()

    def between(self, x):
        return checkpoint(self.norm, x, use_reentrant=False)


CARRYING = {
    **{f"count in a {how}": functools.partial(Annealed, how) for how in ANNEALED},
    **{f"queue in a {how}": functools.partial(Queued, how) for how in ("buffer", "list", "view")},
    "initialised": Initialised,
    "followed": Followed,
    "again": Again,
}
KINDS = (Masked, LayerDrop, Experts, Packed, Averaged, Assigned, Reentrant, Outside, Hooked, Sparse)
adam = functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
momentum = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)
# It has no rule of ipufit's.
adagrad = functools.partial(torch.optim.NAdam, lr=0.02)


def by_hand(net, make=adam, accumulation=1, epochs=2):
    """The loop, in which an update is a mean over its samples."""
    optimizer, batches = make(net.parameters()), list(loader())
    for _ in range(epochs):
        for start in range(0, len(batches), accumulation):
            update = batches[start : start + accumulation]
            samples = sum(len(y) for _, y in update)
            optimizer.zero_grad()
            for x, y in update:
                (nn.functional.cross_entropy(net(x), y) * (len(y) / samples)).backward()
            optimizer.step()
    return net


def fitted(net, make=adam, epochs=2, compiling=(("run_eagerly", True),), **options):
    """A model that is trained in the same way."""
    model = ipufit.Model(net)
    model.compile(make(net.parameters()), "cross_entropy", **dict(compiling))
    model.fit(loader(), epochs=epochs, **{"verbose": 0, **options})
    return model


def assert_same(one, other, atol=1e-10):
    """All parameters and buffers agree."""
    for (name, value), wanted in zip(one.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=atol, msg=name)


def carrying(name):
    """A module that carries something from one micro-batch to the next, as a loop has it."""
    torch.manual_seed(0)
    return CARRYING[name]()


@runs_eagerly
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("run_eagerly", [True, False])
@pytest.mark.parametrize("name", CARRYING)
def test_what_goes_from_one_micro_batch_to_the_next_goes_as_in_a_loop(
    name, run_eagerly, accumulation
):
    """A recording would keep the first value, and a trial forward before it would change it."""
    net, twin = carrying(name), carrying(name)
    compiling = {"run_eagerly": True} if run_eagerly else {}
    told = contextlib.nullcontext() if run_eagerly else pytest.warns(match="can't be recorded as")
    with told:
        fitted(net, compiling=compiling.items(), gradient_accumulation=accumulation)
    assert_same(net, by_hand(twin, accumulation=accumulation))
    with pytest.raises(CaptureError, match=r"forward changes .*, and computes with it in the next"):
        fitted(carrying(name), compiling=[("jit", "graph")])


class Caching(Net):
    """Sets what it sets in every forward alike: a cache, a count, its latest output."""

    calls, table = 0, None

    def between(self, x):
        self.calls += 1
        if self.table is None:
            self.table = torch.arange(6.0, dtype=x.dtype).cos()
        self.latest = x.tanh() * self.table
        return self.latest


@runs_eagerly
def test_what_is_set_alike_in_every_micro_batch_is_recorded():
    """Such as what models cache, or keep for somebody to look at."""
    torch.manual_seed(0)
    net = Caching()
    twin = copy.deepcopy(net)
    with pytest.warns(match=r"forward sets Caching\.calls, Caching\.latest, Caching\.table, but"):
        fitted(net, compiling=[("jit", "graph")])
    assert_same(net, by_hand(twin))


@runs_eagerly
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_module_itself_trains_as_in_a_loop(kind, accumulation):
    """What rests on no recording needs none: whatever forward does, and exact tails beside it."""
    torch.manual_seed(0)
    net = kind()
    twin = copy.deepcopy(net)
    if kind in (Outside, Hooked):
        # What they hold is of the other one in a copy.
        torch.manual_seed(0)
        twin = kind()
    make = momentum if kind is Sparse else adam
    if kind is Sparse:
        make = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    fitted(net, make, gradient_accumulation=accumulation, device_iterations=2)
    if kind is Hooked and accumulation > 1:
        # A hook sees the gradient of each micro-batch here, and the sum of them in a loop.
        return
    assert_same(net, by_hand(twin, make, accumulation))


@runs_eagerly
@pytest.mark.parametrize("make", [adam, momentum, adagrad])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_optimizer_passes_over_what_got_no_gradient_in_an_update(make, accumulation):
    """As torch's do where .grad is None: no decay, no momentum, and a count of updates of its own.

    A gradient in one of the update's micro-batches is enough.
    """
    torch.manual_seed(0)
    net = LayerDrop(modulus=4 if accumulation == 1 else 3)
    twin = copy.deepcopy(net)
    model = fitted(net, make, epochs=3, gradient_accumulation=accumulation)
    optimizer = model.optimizer
    other = make(twin.parameters())
    by_hand(twin, lambda parameters: other, accumulation, epochs=3)
    assert_same(net, twin)
    for one, two in zip(net.parameters(), twin.parameters()):
        for name, value in other.state[two].items():
            if value is not None:
                torch.testing.assert_close(optimizer.state[one][name], value, rtol=0, atol=1e-10)


@runs_eagerly
def test_averages_follow_a_weight_that_an_update_passes_over():
    """An average is one over all updates."""
    torch.manual_seed(0)
    net = LayerDrop()
    twin = copy.deepcopy(net)
    fitted(net, compiling=[("run_eagerly", True), ("ema", ipufit.EMA(momentum=0.8))])
    optimizer, averages = adam(twin.parameters()), None
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(x), y).backward()
            optimizer.step()
            now = [p.detach().clone() for p in twin.parameters()]
            averages = averages or now
            averages = [0.8 * a + 0.2 * p for a, p in zip(averages, now)]
    # A fit ends with the averages as weights.
    for one, two in zip(net.parameters(), averages):
        torch.testing.assert_close(one.detach(), two, rtol=0, atol=1e-10)


class Fails(Callback):
    """Ends a run with an error after a number of executions."""

    def __init__(self, executions):
        super().__init__()
        self.left = executions

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise ZeroDivisionError


class Drawing(Net):
    """Leaves layers out with Python's random numbers, and adds noise of its own generator."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()
        self.generator = random.Random(4)
        self.noise = torch.Generator()

    def between(self, x):
        for layer in self.layers:
            if random.random() < 0.6:
                x = x + layer(x).tanh()
        x = x + 0.1 * torch.rand(x.shape, generator=self.noise, dtype=x.dtype)
        return x * (1 + 0.1 * self.generator.random())


@runs_eagerly
def test_numbers_that_python_draws_are_the_same_for_every_division_and_after_a_resume(tmp_path):
    """A seed fixes them for each micro-batch, as it does those of torch."""
    nets = [Drawing() for _ in range(5)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    fitted(nets[0], seed=3, device_iterations=1)
    fitted(nets[1], seed=3, device_iterations=5)
    checkpoint_of = functools.partial(ipufit.Checkpoint, tmp_path)
    fitted(nets[2], seed=3, epochs=1, checkpoint=checkpoint_of())
    fitted(nets[3], seed=3, checkpoint=checkpoint_of(resume="auto"))
    for net in (nets[1], nets[3]):
        assert_same(nets[0], net, atol=0)
    fitted(nets[4], seed=4)
    assert not torch.equal(nets[4].first.weight, nets[0].first.weight)


@runs_eagerly
def test_forward_sees_what_a_loop_has():
    """Attributes keep what forward sets, and .grad is what it was."""

    class Counts(Net):
        calls = 0

        def between(self, x):
            self.calls += 1
            assert x.sum() == x.sum()
            return x

    net = Counts()
    net.last.bias.grad = torch.ones(3, dtype=torch.float64)
    fitted(net)
    assert net.calls == 12
    assert [p.grad is None for p in net.parameters()] == [True, True, True, False]
    assert net.last.bias.grad.tolist() == [1.0, 1.0, 1.0]


@runs_eagerly
def test_what_the_module_itself_cannot_train_is_refused():
    """The optimizer has the old parameter, and a loss without gradients trains none."""

    class Replaces(Net):
        def between(self, x):
            self.last.weight = nn.Parameter(0.9 * self.last.weight)
            return x

    net = Replaces()
    weight = net.last.weight
    with pytest.raises(CaptureError, match=r"'last\.weight' was replaced by another tensor inside"):
        fitted(net)
    assert net.last.weight is weight

    class Detaches(Net):
        def forward(self, x):
            y = super().forward(x)
            return y if x.sum() < -1e9 else y.detach()

        def between(self, x):
            return x

    with pytest.raises(LossError, match="no gradient reached any of the 4 of Detaches"):
        fitted(Detaches())


SPARSE = {
    "alone": lambda net: torch.optim.SparseAdam([net.words.weight], lr=0.05),
    "beside": lambda net: {
        "words.*": lambda params: torch.optim.SparseAdam(params, lr=0.05),
        "*": lambda params: torch.optim.AdamW(params, lr=0.02),
    },
}


@runs_eagerly
@pytest.mark.parametrize("compiling", [{"run_eagerly": True}, {}], ids=["eager", "auto"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_adam_updates_the_rows_that_a_gradient_came_to(
    name, accumulation, compiling, tmp_path
):
    """In any micro-batch of an update, alone and beside another optimizer; others stay."""

    def trained(net, **options):
        model = ipufit.Model(net)
        model.compile(SPARSE[name](net), "cross_entropy", **compiling)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(loader(), gradient_accumulation=accumulation, verbose=0, **options)
        return net

    torch.manual_seed(0)
    nets = [Sparse()]
    # Rows that no sample asks for, at first.
    nets[0].words = nn.Embedding(40, 6, sparse=True).double()
    nets += [copy.deepcopy(nets[0]) for _ in range(4)]
    trained(nets[0], epochs=3)
    optimizers = [torch.optim.SparseAdam([nets[1].words.weight], lr=0.05)]
    if name == "beside":
        optimizers.append(torch.optim.AdamW(nets[1].last.parameters(), lr=0.02))
    batches = list(loader())
    for start in [*range(0, len(batches), accumulation)] * 3:
        update = batches[start : start + accumulation]
        nets[1].zero_grad()
        for x, y in update:
            loss = nn.functional.cross_entropy(nets[1](x), y, reduction="sum")
            (loss / sum(len(y) for _, y in update)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(nets[0], nets[1], atol=1e-12)
    trained(nets[2], epochs=3, device_iterations=3)
    assert_same(nets[0], nets[2], atol=0)
    trained(nets[3], epochs=1, checkpoint=tmp_path)
    trained(nets[4], epochs=3, checkpoint=ipufit.Checkpoint(tmp_path, resume="auto"))
    assert_same(nets[0], nets[4], atol=0)


def test_sparse_adam_takes_no_dense_gradients():
    """As in torch, whose error comes within the first update."""
    model = ipufit.Model(Masked(), engine="embedded")
    model.compile("sparseadam", "cross_entropy", run_eagerly=True)
    with pytest.raises(ipufit.errors.OptimizerError) as caught:
        model.fit(loader(), verbose=0)
    assert str(caught.value) == (
        "SparseAdam takes only sparse gradients, but that of 'first.weight' is dense. Build its "
        "layer with sparse=True, or give it another optimizer: "
        "{'words.*': torch.optim.SparseAdam, '*': 'adam'}."
    )


# ---- batches that are no rows of tensors --------------------------------------------------------


class Boxes(nn.Module):
    """Finds boxes in images of several sizes: as detectors do, with its own losses."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)
        self.double()

    def forward(self, images, targets):
        losses = []
        for image, target in zip(images, targets):
            inside = [
                self.features(image[None, :, y : y + 2, x : x + 2]).mean((0, 2, 3))
                for x, y in target["boxes"][target["keep"]].tolist()
            ]
            if inside:
                wanted = target["boxes"][target["keep"]].to(image.dtype)
                found = self.head(torch.stack(inside))[:, :2]
                losses.append((found - wanted).abs().mean() * 0.1)
        losses.append(self.features(images[0][None]).square().mean())
        return {"boxes": len(losses)}, torch.stack(losses).mean()


def pictures():
    """Batches of three and of one; in each of the last but one all numbers of rows are three."""
    generator = torch.Generator().manual_seed(1)
    sizes = [[(6, 5), (4, 7), (5, 5)], [(4, 4), (4, 4), (4, 4)], [(8, 4)]]
    batches = []
    for batch in sizes:
        images = [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in batch]
        targets = []
        for number, _ in enumerate(batch):
            count = 3 if batch == sizes[1] else number + 1
            boxes = torch.randint(0, 3, (count, 2), generator=generator)
            targets.append({"boxes": boxes, "keep": boxes.sum(1) > 1})
        batches.append((images, targets))
    return batches


class Rows:
    """An object around tensors, as a library for graphs has them."""

    def __init__(self, x, y, graphs):
        self.x, self.y, self.num_graphs = x, y, graphs


class Rowed(nn.Module):
    """Takes such an object."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 3).double()

    def forward(self, rows):
        outputs = self.last(rows.x)
        return outputs, nn.functional.cross_entropy(outputs, rows.y)


class Packs(nn.Module):
    """Takes a packed sequence."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(6, 3, batch_first=True).double()

    def forward(self, packed):
        return self.cell(packed)[1][-1]


def packed(lengths):
    """Sequences of these lengths, and their classes."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in lengths]
    return nn.utils.rnn.pack_sequence(rows), torch.arange(len(lengths)) % 3


SHAPELESS = {
    "boxes": (Boxes, None, pictures(), [3, 3, 1]),
    "objects": (
        Rowed,
        None,
        [Rows(X[:8], Y[:8], 4), Rows(X[8:13], Y[8:13], 2)],
        [4, 2],
    ),
    "packed": (
        Packs,
        "cross_entropy",
        [packed([5, 4, 2]), packed([3, 3, 1]), packed([6])],
        [3, 3, 1],
    ),
}


@runs_eagerly
@pytest.mark.parametrize("compiling", [{"run_eagerly": True}, {}], ids=["eager", "auto"])
@pytest.mark.parametrize("name", SHAPELESS)
def test_samples_are_counted_where_no_dimension_is_theirs(name, compiling):
    """By lists with an entry for each, or by what an object says: means and tails are exact."""
    kind, loss, batches, sizes = SHAPELESS[name]
    torch.manual_seed(0)
    net = kind()
    twin = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(adam(net.parameters()), loss, **compiling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(batches, epochs=2, gradient_accumulation=2, verbose=0)
    optimizer, losses = adam(twin.parameters()), []
    for _ in range(2):
        for update in (slice(0, 2), slice(2, 4)):
            optimizer.zero_grad()
            counts = sizes[update]
            for batch, size in zip(batches[update], counts):
                if loss is None:
                    value = twin(*(batch if isinstance(batch, tuple) else (batch,)))[1]
                else:
                    value = nn.functional.cross_entropy(twin(batch[0]), batch[1])
                (value * (size / sum(counts))).backward()
                losses.append(value.item() * size)
            if counts:
                optimizer.step()
    assert_same(net, twin)
    whole = [sum(losses[: len(sizes)]) / sum(sizes), sum(losses[len(sizes) :]) / sum(sizes)]
    assert model.history.history["loss"] == pytest.approx(whole, rel=1e-12)


class Detects(Boxes):
    """Has a dict of boxes for each image, of as many as it finds."""

    def forward(self, images, targets=None):
        detections = []
        for image in images:
            cells = self.head(self.features(image[None])[0].flatten(1).T)
            rows = (cells[:, 0] > 0).nonzero().squeeze(1)
            detections.append({"boxes": cells[rows], "places": rows})
        if targets is None:
            return detections
        return detections, torch.stack([each["boxes"].square().mean() for each in detections]).sum()


@runs_eagerly
@pytest.mark.parametrize("has_targets", [True, False])
def test_a_detector_predicts_a_dict_for_each_image_in_order(has_targets):
    """Images of one size are no rows either, and three of them are not their three channels."""
    torch.manual_seed(0)
    net = Detects()
    data = pictures() if has_targets else [(images,) for images, _ in pictures()]
    expected = [each for images, _ in pictures() for each in net(images)]
    model = ipufit.Model(net)
    model.compile("sgd", run_eagerly=True)
    counts = []
    for parts in (model.predict(data, verbose=0), [*model.predict_iter(data)]):
        parts = parts if isinstance(parts[0], dict) else [each for part in parts for each in part]
        assert len(parts) == len(expected) == 7
        counts += [len(part["places"]) for part in parts]
        for part, other in zip(parts, expected):
            assert part.keys() == other.keys()
            assert all(torch.equal(part[name], other[name]) for name in part)
    assert len(set(counts)) > 1
    if has_targets:
        losses = [net(*batch)[1].item() * len(batch[0]) for batch in data]
        assert model.evaluate(data, verbose=0)["loss"] == pytest.approx(sum(losses) / 7)


def test_lists_of_several_outputs_stay_lists_of_outputs():
    """Two outputs for two samples are no output for each."""

    class Heads(nn.Module):
        def forward(self, x):
            return [{"a": x}, {"a": 2 * x}]

    one, two = ipufit.Model(Heads()).predict(torch.arange(6.0).reshape(6, 1), batch_size=2)
    assert one["a"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert two["a"].flatten().tolist() == [0, 2, 4, 6, 8, 10]


# ---- jit="auto" ---------------------------------------------------------------------------------


def caught(call):
    """The texts of all warnings of a call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in seen]


@runs_eagerly
def test_what_cannot_be_recorded_runs_itself_and_says_so_once(capsys):
    """With module, line, what to write instead, and what it costs."""
    torch.manual_seed(0)
    net = Experts()
    twin = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(adam(net.parameters()), "cross_entropy", metrics=["accuracy"])

    def work():
        model.fit(loader(), epochs=2, validation_data=loader(), device_iterations=2, verbose=0)
        model.evaluate(loader(), verbose=0)
        assert model.predict(X, verbose=0).shape == (44, 3)

    (text,) = caught(work)
    line = Experts.between.__code__.co_firstlineno + 4
    assert text == (
        "Experts can't be recorded as one program, so jit='auto' runs the module itself: a "
        "shape depends on a tensor's values, but the shapes of the program are fixed when it is "
        f"recorded, at {__file__}:{line} in between: `rows = torch.where(chosen == i)[0]`. Keep "
        "the full shape: write torch.where(mask, x, 0) instead of x[mask], topk with a fixed k "
        "instead of nonzero or unique. The numbers are the same, but it is slower: Python runs "
        "for every micro-batch, and no operators are fused or compiled. To silence this "
        "warning, use compile(..., run_eagerly=True); jit='graph' makes it an error."
    )
    assert model.history.params["jit"] == "off"
    model.explain()
    explanation = capsys.readouterr().out
    assert "Runs the module itself, eagerly on the embedded engine" in explanation
    assert (
        "It can't be recorded to train, so jit='auto' runs it eagerly: a shape depends on"
        in explanation
    )
    assert_same(net, by_hand(twin))


class Recomputed(torch.autograd.Function):
    """Dropout that the backward pass draws again, as reversible layers do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        torch.manual_seed(5)
        return nn.functional.dropout(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        torch.manual_seed(5)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(nn.functional.dropout(x), x, gradient)


class Reversible(Net):
    """Has a layer whose masks a seed in forward fixes."""

    def between(self, x):
        return Recomputed.apply(x)


@runs_eagerly
def test_a_seed_in_forward_fixes_what_follows_it():
    """A recording would draw another mask in the backward pass, and so a wrong gradient."""
    torch.manual_seed(0)
    net = Reversible()
    twin = copy.deepcopy(net)
    match = "random numbers were drawn after the generator was reset, as torch.manual_seed does"
    with pytest.warns(UserWarning, match=match):
        fitted(net, compiling=())
    assert_same(net, by_hand(twin))
    with pytest.raises(CaptureError, match=match):
        fitted(net, compiling=[("jit", "graph")])


class Noisy(Net):
    """Adds noise of a generator of its own, which forward makes, seeds again, or leaves alone.

    Args:
        way: which of these.
    """

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.noise = torch.Generator().manual_seed(3)

    def between(self, x):
        if self.way == "made":
            generator = torch.Generator().manual_seed(5)
        else:
            generator = self.noise if self.way == "kept" else self.noise.manual_seed(5)
        return x + torch.rand(x.shape, generator=generator, dtype=x.dtype)


def records_generators():
    """Whether torch's tracer takes them, which old versions don't."""
    try:
        make_fx(lambda x: x + torch.rand(2, generator=torch.Generator()))(torch.ones(2))
    except NotImplementedError:
        return False
    return True


@runs_eagerly
@pytest.mark.parametrize("way", ["made", "seeded again"])
def test_a_generator_that_forward_makes_or_seeds_has_the_same_numbers_each_time(way):
    """A recording would go on with one stream of them, unlike the loop."""
    net, twin = Noisy(way), Noisy(way)
    twin.load_state_dict(net.state_dict())
    match = "drawn from a torch.Generator that is made or seeded in the step, which has the same"
    if not records_generators():
        match = (
            "a torch.Generator was passed to an operator, which this version of torch can't record"
        )
    with pytest.warns(UserWarning, match=match):
        fitted(net, compiling=())
    assert_same(net, by_hand(twin))
    with pytest.raises(CaptureError, match=match):
        fitted(net, compiling=[("jit", "graph")])
    state = net.noise.get_state()
    with pytest.raises(CaptureError, match=match):
        fitted(net, compiling=[("jit", "graph")])
    assert torch.equal(net.noise.get_state(), state)


@runs_eagerly
def test_a_generator_of_the_module_goes_on_in_a_recording():
    """As in the loop: no draw is repeated, and looking for seeds leaves it as it was."""
    net, twin = Noisy("kept"), Noisy("kept")
    twin.load_state_dict(net.state_dict())
    if not records_generators():
        with pytest.raises(CaptureError, match="Update torch, or draw from its default generator"):
            fitted(net, compiling=[("jit", "graph")])
        return
    fitted(net, compiling=[("jit", "graph")])
    assert_same(net, by_hand(twin))


@runs_eagerly
@pytest.mark.parametrize("jit", ["graph", "kernels"])
def test_other_ways_stay_strict(jit):
    """Who asks for a recorded program gets one, or an error."""
    with pytest.raises(CaptureError, match="a shape depends on a tensor's values"):
        fitted(Experts(), compiling=[("jit", jit)])


@runs_eagerly
def test_what_is_recorded_stays_so():
    """A module that can be recorded in training is, whatever it does in evaluation."""

    class Evaluating(Net):
        def between(self, x):
            return x if self.training else x * x.max().item()

    net = Evaluating()
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    (text,) = caught(lambda: model.fit(loader(), validation_data=loader(), verbose=0))
    assert "a tensor's value was turned into a Python number" in text
    assert model.history.params["jit"] != "off"
    assert caught(lambda: model.fit(loader(), verbose=0)) == []


class Late(Net):
    """Longer rows draw from Python's generator, and now and then skip a layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 6).double()
        self.middle, self.unused = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.drop = nn.Dropout(0.2)

    def between(self, x):
        x = self.drop(x)
        if x.shape[1] < 5:
            return (x + self.middle(x)).mean(1)
        x = x * (1 + 0.1 * random.random())
        return (x + self.middle(x) if x.sum() > 0 else x).mean(1)

    def forward(self, x):
        return super().forward(x[..., None])


WIDTHS = (3, 5, 3, 4, 5, 6, 3, 5, 5, 4)


def of_widths(widths=WIDTHS):
    """Batches of four rows of these widths."""
    batches = []
    for number, width in enumerate(widths):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, width, generator=generator, dtype=torch.float64)
        batches.append((x, torch.randint(0, 3, (4,), generator=generator)))
    return batches


def late_fit(drop=0.2, jit="auto", epochs=2, data=None, **options):
    """A model that is trained with rows of several widths."""
    torch.manual_seed(0)
    net = Late()
    net.drop.p = drop
    model = ipufit.Model(net)
    model.compile(adam(net.parameters()), "cross_entropy", jit=jit)
    options = {"seed": 3, "verbose": 0, **options}
    model.fit(of_widths() if data is None else data, epochs=epochs, **options)
    return model


@runs_eagerly
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_shape_that_cannot_be_recorded_runs_itself_among_others(accumulation, monkeypatch):
    """The others stay recorded; an update mixes both, and passes over what no gradient reached."""
    monkeypatch.setattr(random, "random", lambda: 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = late_fit(drop=0.0, gradient_accumulation=accumulation, device_iterations=2)
    torch.manual_seed(0)
    twin = Late()
    twin.drop.p = 0.0
    optimizer, batches = adam(twin.parameters()), of_widths()
    for _ in range(2):
        for start in range(0, len(batches), accumulation):
            optimizer.zero_grad()
            for x, y in batches[start : start + accumulation]:
                (nn.functional.cross_entropy(twin(x), y) / accumulation).backward()
            optimizer.step()
    assert_same(model.module, twin)
    assert model.history.params["recordings"] == 2
    assert model.history.params["eager_shapes"] == 2
    assert model.history.params["jit"] != "off"


@runs_eagerly
@pytest.mark.parametrize(("seed", "recordings"), [(0, 2), (3, 0)])
def test_what_runs_itself_depends_on_no_division_and_on_no_interruption(seed, recordings, tmp_path):
    """Not on which shape comes first after it: nothing is recorded where the run's first can't be.

    The first batches of both epochs have another width.
    """
    data = DataLoader(of_widths(), batch_size=None, shuffle=True)
    fit = functools.partial(late_fit, data=data, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = fit()
        assert_same(whole.module, fit(device_iterations=4).module, atol=0)
        assert whole.history.params["recordings"] == recordings
        for number in (2, 5, 12, 13):
            here = functools.partial(ipufit.Checkpoint, tmp_path / str(number))
            with pytest.raises(ZeroDivisionError):
                fit(checkpoint=here(every_updates=1), callbacks=[Fails(number)])
            again = fit(checkpoint=here(resume="auto"), callbacks=[Fails(0)])
            assert again.history.params["resumed"]["update"] == number - 1
            assert_same(whole.module, again.module, atol=0)
            for name in ("recordings", "eager_shapes", "jit"):
                assert again.history.params[name] == whole.history.params[name]


@runs_eagerly
def test_a_shape_that_runs_itself_is_warned_of_once(capsys):
    """With module, shape, line, what to write instead, and what it costs."""
    models = []

    def work():
        models.append(late_fit())
        models[0].evaluate(of_widths(), verbose=0)
        assert models[0].predict([x for x, _ in of_widths()], verbose=0).shape == (40, 3)

    (text,) = caught(work)
    line = Late.between.__code__.co_firstlineno + 5
    reason = (
        "Python branched on a tensor's value, but the program is recorded once, before there are "
        f"values, at {__file__}:{line} in between: `return (x + self.middle(x) if x.sum() > 0 else "
        "x).mean(1)`. Write torch.where(condition, a, b), or multiply by a mask, so that both "
        "branches are in the program."
    )
    assert text == (
        "Late can't be recorded as one program for batches of (4, 5), (4,), so jit='auto' runs "
        f"the module itself for them: {reason} The numbers are the same, but it is slower: "
        "Python runs for each of these micro-batches, and no operators are fused or compiled. "
        "To silence this warning, use compile(..., run_eagerly=True); jit='graph' makes it an "
        "error."
    )
    capsys.readouterr()
    models[0].explain()
    explanation = capsys.readouterr().out
    assert "Runs one recorded program" in explanation
    assert (
        "Batches of (4, 5), (4,); (4, 6), (4,) can't be recorded to train, so jit='auto' runs them "
        f"eagerly: {reason}"
    ) in explanation
    assert "Training is recorded for 2 shapes of batches: (4, 3), (4,) in " in explanation


@runs_eagerly
def test_who_asks_for_programs_gets_no_other():
    with pytest.raises(CaptureError, match="Python branched on a tensor's value"):
        late_fit(jit="graph")


@runs_eagerly
def test_a_smaller_last_batch_that_cannot_be_recorded_runs_itself():
    """All others are recorded."""

    class Small(Net):
        def between(self, x):
            return x if len(x) > 4 else x * x.detach().max().item()

    torch.manual_seed(0)
    net = Small()
    twin = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(adam(net.parameters()), "cross_entropy")
    (text,) = caught(lambda: model.fit(loader(), epochs=2, verbose=0))
    assert text.startswith("Small can't be recorded as one program for batches of (4, 6), (4,), so")
    assert_same(net, by_hand(twin))


def test_a_fault_of_the_module_is_no_matter_of_recording():
    """The module itself says what is wrong, and nothing is warned of."""

    class Faulty(Net):
        def between(self, x):
            return x.reshape(-1, 7) * x.max().item()

    model = ipufit.Model(Faulty())
    model.compile("sgd", "cross_entropy")

    def fit():
        with pytest.raises(ipufit.errors.DataError, match="reshape"):
            model.fit(loader(), verbose=0)

    assert caught(fit) == []
