"""A run that was interrupted and goes on ends with the bits of one that was not."""

import dataclasses
import gc
import random

import numpy as np
import pytest
import torch
import torchmetrics
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ipufit
from ipufit.callbacks import (
    Callback,
    EarlyStopping,
    ReduceLROnPlateau,
    SwapEMAWeights,
)
from tests.caching import once_per_engine
from tests.engines import embedded_only, keeps_averages, one_shape, runs_eagerly, scales_itself
from tests.fitting import skipping_refusals
from tests.nets import CNN, MLP, Running, data
from tests.points import only
from tests.told import Executions

X, Y = data(23)
WHOLE = TensorDataset(X, Y)


class EndError(Exception):
    """What ends a run in these tests."""


class Ends(Callback):
    """Raises before an execution, counted from the start of its own fit; never if that is None."""

    def __init__(self, before=None):
        super().__init__()
        self.left = before

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise EndError
        self.left = None if self.left is None else self.left - 1


def loader(dataset=WHOLE, **options):
    if options.get("num_workers"):
        # An error that went through a recording holds a file of old torch's, which a worker, made
        # by fork, would remove as well.
        gc.collect()
    return DataLoader(dataset, **{"batch_size": 2, "shuffle": True, **options})


class Noisy(Dataset):
    """Draws from every generator there is."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        noise = torch.rand(X[index].shape) + random.random() + np.random.rand()
        return X[index] + 0.1 * noise.double(), Y[index]


class Stream(IterableDataset):
    """Samples in their order, over and over again with other noise."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from zip(X, Y)


class Stateful(Stream):
    """Goes on by itself, and would notice if it were read from its beginning."""

    def __init__(self):
        super().__init__()
        self.start = self.read = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for place in range(start, len(X)):
            self.read = place + 1
            yield X[place] + 0.01 * self.read, Y[place]

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.start = state["read"]


class Shuffling:
    """A loader with an order of its own, which goes on from epoch to epoch, and tells its place."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(int(torch.randint(99, ())))
        self.start = self.read = 0
        self.before = self.generator.get_state()

    def __iter__(self):
        start, self.start = self.start, 0
        self.before = self.generator.get_state()
        order = torch.randperm(22, generator=self.generator).view(11, 2)
        for self.read in range(start + 1, 12):
            rows = order[self.read - 1]
            yield X[rows], Y[rows]
        self.before, self.read = self.generator.get_state(), 0

    def state_dict(self):
        return {"generator": self.before, "read": self.read}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.start = state["read"]


RESUMING = ("resume", "resume_changes", "max_restarts")


def resuming(checkpoint, **fields):
    """What ``fit`` takes: a folder or a Checkpoint, with other fields if there are any."""
    if not fields:
        return checkpoint
    if isinstance(checkpoint, ipufit.Checkpoint):
        return dataclasses.replace(checkpoint, **fields)
    return ipufit.Checkpoint(checkpoint, **fields)


class Case:
    """One way to train. Arguments make anew what a process would.

    Args:
        net: makes the module.
        train: makes what is trained on.
        callbacks: makes the callbacks.
        compile: options of it.
        fit: options of it.
    """

    def __init__(self, net=CNN, train=loader, callbacks=list, compile=None, **fit):
        self.net, self.train, self.callbacks = net, train, callbacks
        self.compile = compile or (lambda net: {})
        self.fit = {"epochs": 2, "verbose": 0, **fit}

    def run(self, before=None, checkpoint=None, **options):
        """A fit, which ends before an execution if asked to; fields of Checkpoint are options."""
        fields = {name: options.pop(name) for name in RESUMING if name in options}
        torch.manual_seed(1)
        model = ipufit.Model(self.net().double())
        given = {"optimizer": "adam", "loss": "cross_entropy", "metrics": ["accuracy"]}
        with skipping_refusals():
            model.compile(**{**given, **self.compile(model.module)})
        # A new process has other random numbers.
        start = 99 if "resume" in fields else 7
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(start)
        callbacks = [*self.callbacks(), Ends(before)]
        arguments = {**self.fit, "callbacks": callbacks, **options}
        checkpoint = resuming(checkpoint, **fields)
        try:
            with skipping_refusals():
                model.fit(self.train(), checkpoint=checkpoint, **arguments)
        except EndError:
            assert before is not None
        return model

    def whole(self):
        """What a run comes to that nothing has interrupted; one run for all tests of this case."""
        return uninterrupted(self)


@once_per_engine
def uninterrupted(case):
    return state(case.run())


def state(model):
    """Everything that must be equal in every bit."""
    optimizer = model.optimizer.state_dict()
    tensors = dict(model.module.state_dict())
    for key, values in optimizer["state"].items():
        for name, value in values.items():
            if value is not None:
                tensors[f"{name} of {key}"] = torch.as_tensor(value)
    history = model.history
    return tensors, {
        "groups": [
            {k: v for k, v in g.items() if k != "params"} for g in optimizer["param_groups"]
        ],
        "history": {name: history.aligned(name) for name in history.history},
        "epoch": history.epoch,
        "updates": history.updates,
        "done": history.params["updates_done"],
    }


def assert_same(model, expected):
    tensors, rest = state(model)
    wanted, others = expected
    assert tensors.keys() == wanted.keys()
    for name, value in tensors.items():
        assert torch.equal(value, wanted[name]), name
    # As text, in which NaN equals NaN.
    assert repr(rest) == repr(others)


class Metered(torchmetrics.Metric):
    """Keeps a list, as metrics over all samples do."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, prediction, target):
        self.seen.append(prediction.argmax(1).double() - target)

    def compute(self):
        return torch.cat(self.seen).abs().mean()


def torchs(net):
    """Metrics of torchmetrics, several of which share what they have seen."""
    several = torchmetrics.MetricCollection(
        [
            torchmetrics.classification.MulticlassPrecision(5),
            torchmetrics.classification.MulticlassRecall(5),
        ]
    )
    return {"metrics": [several, Metered()]}


def stepped(net):
    """A scheduler of torch's that goes by epochs."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 2, gamma=0.3)}


def waiting():
    """Callbacks with a memory."""
    return [
        ReduceLROnPlateau("val_loss", patience=1, min_delta=0.5),
        EarlyStopping("val_accuracy", patience=2, restore_best_weights=True, mode="max"),
    ]


def with_options(**options):
    return lambda net: options


CASES = {
    "dropout and BatchNorm": Case(seed=5),
    "an execution over several updates": Case(seed=5, device_iterations=5),
    "a seed of its own": Case(),
    "replicas and accumulation": Case(seed=5, ipus=2, gradient_accumulation=2),
    "merged": Case(MLP, seed=5, ipus=2, gradient_accumulation=2),
    "buffers of replicas": Case(Running, seed=5, ipus=2),
    "no order of its own": Case(train=lambda: loader(shuffle=False), seed=5),
    "prefetched": Case(seed=5, loading=ipufit.Loading(prefetch=2)),
    "workers": Case(train=lambda: loader(num_workers=1, worker_init_fn=hash), seed=5),
    "a generator of the user's": Case(
        train=lambda: loader(generator=torch.Generator().manual_seed(3)), seed=5
    ),
    "data that draws": Case(train=lambda: loader(Noisy()), seed=5),
    "epochs that are parts of passes": Case(seed=5, steps_per_epoch=5, epochs=6),
    "parts of passes over a stream": Case(
        train=lambda: loader(Stream(), shuffle=False), seed=5, steps_per_epoch=5, epochs=6
    ),
    "a stream": Case(train=lambda: loader(Stream(), shuffle=False), seed=5),
    "a stream that goes on by itself": Case(
        train=lambda: loader(Stateful(), shuffle=False), seed=5
    ),
    "a loader that goes on by itself": Case(train=Shuffling, seed=5),
    "validation and callbacks with a memory": Case(
        callbacks=waiting, seed=5, validation_data=(X[:9], Y[:9]), epochs=5
    ),
    "metrics of torchmetrics": Case(compile=torchs, seed=5),
    "a schedule by update": Case(
        compile=with_options(lr_scheduler=lambda update: 0.1 * 0.9**update), seed=5
    ),
    "a scheduler of torch's": Case(compile=stepped, seed=5, epochs=3),
    "clipped": Case(compile=with_options(clip=ipufit.Clip(global_norm=0.1)), seed=5),
    "float32 moments in lamb": Case(compile=with_options(optimizer="lamb"), seed=5),
}


class Pooled(CNN):
    """A network for pictures of any size."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x).mean((2, 3)))


class AnySize:
    """Batches of 1 to 4 samples, in another order and division each time; tells no batch size."""

    def __iter__(self):
        order = torch.randperm(len(X)).tolist()
        while order:
            size = int(torch.randint(1, 5, ()))
            yield order[:size]
            del order[:size]


def cropped(samples):
    """A batch of pictures whose height depends on the first of them."""
    x, y = torch.utils.data.default_collate(samples)
    return x[:, :, : 2 + int(y[0]) % 2], y


EMBEDDED = {
    "batches of several shapes": (
        Case(
            Pooled,
            lambda: DataLoader(WHOLE, batch_sampler=AnySize(), collate_fn=cropped),
            # Of a sum it matters how large a full micro-batch is.
            compile=with_options(loss=torch.nn.CrossEntropyLoss(reduction="sum")),
            seed=5,
            gradient_accumulation=2,
            device_iterations=2,
        ),
        one_shape,
    ),
    "averages": (
        Case(
            callbacks=lambda: [SwapEMAWeights(swap_on_epoch=True)],
            compile=with_options(ema=ipufit.EMA(overwrite_frequency=None)),
            seed=5,
            validation_data=(X[:9], Y[:9]),
        ),
        keeps_averages,
    ),
    "a dynamic loss scale": (
        Case(
            compile=with_options(
                precision=ipufit.Precision(loss_scale=ipufit.LossScale(2.0**10, 3))
            ),
            seed=5,
        ),
        scales_itself,
    ),
    "eager": (Case(compile=with_options(run_eagerly=True), seed=5), runs_eagerly),
    "each replica its statistics": (
        Case(seed=5, ipus=2),
        embedded_only("an IPU's replicas share the statistics of the first when read"),
    ),
}
ALL = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=mark) for name, (case, mark) in EMBEDDED.items()),
]


# Updates that an execution shares, epochs within a pass, and callbacks with a memory; the first and
# the last case are interrupted elsewhere below.
SOME = (
    "an execution over several updates",
    "epochs that are parts of passes",
    "validation and callbacks with a memory",
    "batches of several shapes",
)


@pytest.mark.few("an execution over several updates", "batches of several shapes")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("case", only(SOME, ALL))
def test_the_bits_are_those_of_a_run_that_was_not_interrupted(case, tmp_path):
    interrupted(case, 0.6, tmp_path)


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("share", [0.2, 0.34, 0.7])
def test_loaders_of_torchdata(share, workers, tmp_path):
    """Whose shuffling goes on from epoch to epoch."""
    data_of = pytest.importorskip("torchdata.stateful_dataloader")

    def train():
        gc.collect()
        return data_of.StatefulDataLoader(WHOLE, batch_size=2, shuffle=True, num_workers=workers)

    case = Case(MLP, train, seed=5)
    interrupted(case, share, tmp_path)


def test_workers_that_stay_draw_their_seed_from_the_generator_of_the_user_once(tmp_path):
    """The run that goes on in the first pass has workers already, but the order of new ones."""

    def train():
        generator = torch.Generator().manual_seed(3)
        return loader(generator=generator, num_workers=1, persistent_workers=True)

    interrupted(Case(MLP, train, seed=5), 0.2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.1, 0.35, 0.8, 1.0])
@pytest.mark.parametrize("case", ALL)
def test_wherever_it_is_interrupted(case, share, tmp_path):
    interrupted(case, share, tmp_path)


def interrupted(case, share, tmp_path):
    """After this share of the executions."""
    expected, executions = counted(case)
    before = max(1, round(share * (executions - 1)))
    checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=1)
    case.run(before, checkpoint=checkpoint)
    model = case.run(checkpoint=tmp_path / "run", resume="auto")
    assert_same(model, expected)
    assert model.history.params["resumed"]["update"] > 0


@once_per_engine
def counted(case):
    """What a run comes to that nothing has interrupted, and in how many executions."""
    whole = Executions()
    model = case.run(callbacks=[*case.callbacks(), Ends(), whole])
    return state(model), whole.count


class Silent(ipufit.History):
    """Leaves it to ``fit`` to add the epochs."""

    def on_epoch_end(self, epoch, logs=None):
        pass


@pytest.mark.long
def test_a_checkpoint_has_its_epoch_in_a_history_that_does_not_add_it_itself(tmp_path):
    case = Case(MLP, callbacks=lambda: [Silent()], seed=5)
    whole = case.run(checkpoint=tmp_path / "whole").history
    case.run(checkpoint=tmp_path / "run", epochs=1)
    resumed = case.run(checkpoint=tmp_path / "run", resume="auto").history
    assert resumed.epoch == whole.epoch == [0, 1]
    assert resumed.history == whole.history
