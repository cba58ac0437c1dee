"""Every form of data trains to the same bits of weights, and each option of it has an effect."""

import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import ipufit
from ipufit.data.in_memory import EpochOrder
from ipufit.testing import RecordingEngine
from ipufit.utils.random_streams import stream_key
from tests.caching import once_per_engine
from tests.faulty import Batches, Samples, Stream, assert_same_bits, batches
from tests.nets import MLP, data

X, Y = data(37)
PAIRS = TensorDataset(X, Y)


def trained(*args, epochs=2, **options):
    """Weights after a fit of a net with dropout."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 5)).double()
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    model.fit(*args, epochs=epochs, seed=7, verbose=0, **options)
    return net.state_dict()


@once_per_engine
def trained_on_a_loader():
    """What every form is held against."""
    return trained(DataLoader(PAIRS, batch_size=4))


def by_hand():
    """Batches as a user would cut them."""
    return [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 37, 4)]


def mapped(tmp_path, array, name="x"):
    """The array as a memory-mapped one."""
    np.save(tmp_path / f"{name}.npy", array)
    return np.load(tmp_path / f"{name}.npy", mmap_mode="r")


def collate(samples):
    """What torch's own collate would do."""
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


FORMS = {
    "tensors": lambda path: ((X, Y), {"batch_size": 4, "shuffle": False}),
    "arrays": lambda path: ((X.numpy(), Y.numpy()), {"batch_size": 4, "shuffle": False}),
    "mapped": lambda path: (
        (mapped(path, X.numpy()), mapped(path, Y.numpy(), "y")),
        {"batch_size": 4, "shuffle": False},
    ),
    "mixed": lambda path: ((X, Y.numpy()), {"batch_size": 4, "shuffle": False}),
    "tuple of one": lambda path: (((X,), Y), {"batch_size": 4, "shuffle": False}),
    "dataset": lambda path: ((PAIRS,), {"batch_size": 4, "shuffle": False}),
    "own dataset": lambda path: ((Samples(list(PAIRS)),), {"batch_size": 4, "shuffle": False}),
    "stream": lambda path: ((Stream(list(PAIRS)),), {"batch_size": 4}),
    "batches": lambda path: ((by_hand(),), {}),
    "numpy batches": lambda path: (([(x.numpy(), y.numpy()) for x, y in by_hand()],), {}),
    "iterable": lambda path: ((Batches(by_hand()),), {}),
    "sampler": lambda path: ((DataLoader(PAIRS, 4, sampler=SequentialSampler(PAIRS)),), {}),
    "batch sampler": lambda path: (
        (DataLoader(PAIRS, batch_sampler=BatchSampler(SequentialSampler(PAIRS), 4, False)),),
        {},
    ),
    "indices": lambda path: (
        (DataLoader(PAIRS, batch_sampler=[range(i, min(i + 4, 37)) for i in range(0, 37, 4)]),),
        {},
    ),
    "collate_fn": lambda path: ((DataLoader(PAIRS, 4, collate_fn=collate),), {}),
    "workers": lambda path: ((DataLoader(PAIRS, 4, num_workers=2),), {}),
    "persistent": lambda path: (
        (DataLoader(PAIRS, 4, num_workers=1, persistent_workers=True),),
        {},
    ),
    "no batch size": lambda path: ((DataLoader(Samples(by_hand()), batch_size=None),), {}),
    "stream of batches": lambda path: ((DataLoader(Stream(by_hand()), batch_size=None),), {}),
}


@pytest.mark.few("mapped")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("name", FORMS)
def test_each_form_trains_to_the_same_bits(name, tmp_path):
    """How data is kept is a matter of convenience alone."""
    args, options = FORMS[name](tmp_path)
    assert_same_bits(trained(*args, **options), trained_on_a_loader())


@pytest.mark.long
@pytest.mark.parametrize("name", ["tensors", "arrays", "mapped", "dataset"])
def test_shuffled_forms_have_one_order_that_depends_on_seed_and_epoch(name, tmp_path):
    """The order is that of a generator of its own, keyed by seed and epoch."""
    args, options = FORMS[name](tmp_path)
    options["shuffle"] = True
    batches = []
    for epoch in range(2):
        order = list(EpochOrder(37, stream_key(7, "train", "order", epoch)))
        assert sorted(order) == list(range(37))
        batches.append([order[i : i + 4] for i in range(0, 37, 4)])
    assert batches[0] != batches[1]
    epochs = iter(batches)

    class Ordered:
        def __iter__(self):
            return iter([(X[rows], Y[rows]) for rows in next(epochs)])

    expected = trained(Ordered())
    torch.manual_seed(99)
    assert_same_bits(trained(*args, **options), expected)
    # Shuffling is the default.
    assert_same_bits(trained(*args, batch_size=4), expected)


def rows(program):
    """First feature of all samples that a recorded program was fed, in order."""
    fed = [b.leaves[0] for e in program.executions for b in e.micro_batches]
    return torch.cat([leaf.reshape(len(leaf), -1)[:, 0] for leaf in fed]).long().tolist()


def recording(loss="mse"):
    """A model that computes nothing and remembers everything."""
    engine = RecordingEngine()
    model = ipufit.Model(MLP(), engine=lambda: engine)
    model.compile("sgd", loss)
    return model, engine


NUMBERED = torch.arange(10.0)[:, None]


def test_an_epoch_has_the_same_order_whatever_came_before_it():
    """A run that is resumed at epoch 2 sees what it would have seen."""
    orders = []
    for first in (0, 2):
        model, engine = recording()
        model.fit(NUMBERED, NUMBERED, epochs=range(first, 3), seed=1, verbose=0)
        orders.append(rows(engine.programs[0])[-10:])
    assert orders[0] == orders[1] != list(range(10))
    model, engine = recording()
    model.fit(NUMBERED, NUMBERED, epochs=range(2, 3), seed=2, verbose=0)
    assert rows(engine.programs[0]) != orders[0]


class ByEpoch:
    """Begins with another row in every epoch, if somebody says which one it is."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10

    def __iter__(self):
        return iter([(row + self.epoch) % 10 for row in range(10)])


class StreamByEpoch(ByEpoch, IterableDataset):
    """Samples in this order."""

    def __iter__(self):
        return iter([(NUMBERED[row], NUMBERED[row]) for row in super().__iter__()])


class BatchesByEpoch(ByEpoch):
    """Batches in this order."""

    def __iter__(self):
        return iter([(NUMBERED[row, None], NUMBERED[row, None]) for row in super().__iter__()])


class RowsByEpoch(ByEpoch):
    """Indices of batches in this order."""

    def __iter__(self):
        return iter([[row] for row in super().__iter__()])


NUMBERS = TensorDataset(NUMBERED, NUMBERED)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(NUMBERS, 5, sampler=ByEpoch()),
        lambda: DataLoader(NUMBERS, batch_sampler=BatchSampler(ByEpoch(), 5, False)),
        lambda: DataLoader(NUMBERS, batch_sampler=RowsByEpoch()),
        lambda: DataLoader(StreamByEpoch(), 5),
        StreamByEpoch,
        BatchesByEpoch,
    ],
    ids=["sampler", "inner sampler", "batch sampler", "loader of a stream", "stream", "batches"],
)
def test_data_that_orders_itself_by_epoch_is_told_which_one_begins(make):
    """A loop by hand calls set_epoch; without it every epoch would have the order of the first."""
    model, engine = recording()
    data = make()
    model.fit(data, epochs=range(1, 4), verbose=0)
    expected = [(row + epoch) % 10 for epoch in (1, 2, 3) for row in range(10)]
    assert rows(engine.programs[0]) == expected
    model.evaluate(data, verbose=0)
    assert rows(engine.programs[-1]) == list(range(10))


def test_a_loop_that_says_the_epoch_itself_has_its_order():
    """Each fit of one epoch begins with the one that its sampler was told."""
    model, engine = recording()
    sampler = ByEpoch()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.fit(DataLoader(NUMBERS, 5, sampler=sampler), verbose=0)
        assert rows(engine.programs[-1])[-10:] == [(row + epoch) % 10 for row in range(10)]
        assert sampler.epoch == epoch


@pytest.mark.parametrize("work", [{}, {"steps_per_epoch": 4}], ids=["epochs", "steps"])
def test_a_run_in_an_order_by_epoch_goes_on_with_the_same_bits(work, tmp_path):
    """A process that begins in a later epoch has a sampler that has seen none before."""

    def run(name, epochs, resume=None):
        sampler = DistributedSampler(PAIRS, num_replicas=1, rank=0, seed=3)
        checkpoint = ipufit.Checkpoint(tmp_path / name, resume=resume)
        loader = DataLoader(PAIRS, 4, sampler=sampler)
        return trained(loader, epochs=epochs, checkpoint=checkpoint, **work)

    whole = run("whole", 4)
    run("parts", 2)
    assert_same_bits(run("parts", 4, "auto"), whole)


def test_the_default_batch_size_is_keras():
    """32, for tensors, arrays and datasets."""
    ones = torch.ones(70, 2)
    for args in ((ones, ones), (TensorDataset(ones, ones),), (Stream(list(zip(ones, ones))),)):
        model, engine = recording()
        model.fit(*args, verbose=0)
        sizes = [b.size for e in engine.programs[0].executions for b in e.micro_batches]
        assert sizes == [32, 32, 6]
        assert model.history.params["micro_batch_size"] == 32


def test_evaluate_predict_and_validation_keep_the_order():
    """Outputs belong to their inputs."""
    model, engine = recording()
    model.fit(NUMBERED, NUMBERED, validation_data=(NUMBERED, NUMBERED), verbose=0)
    model.evaluate(NUMBERED, NUMBERED, batch_size=3, verbose=0)
    assert model.predict(NUMBERED, batch_size=4, verbose=0).flatten().tolist() == list(range(10))
    last = [rows(program) for program in engine.programs if program.executions][1:]
    assert last == [list(range(10))] * 3


class Halves(Sampler):
    """Yields the second half first."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        return iter([*range(5, 10), *range(5)])

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": SubsetRandomSampler(range(10))},
        {"sampler": WeightedRandomSampler([1.0] * 10, 10)},
        {"sampler": Halves(shuffle=True)},
        {"batch_sampler": ipufit.data.LengthBuckets(NUMBERED, 4)},
        {"batch_sampler": BatchSampler(RandomSampler(range(10)), 4, False)},
    ],
    ids=["shuffle", "subset", "weighted", "sampler", "buckets", "batches of a sampler"],
)
def test_predictions_in_an_order_that_is_drawn_are_told(options):
    """Whoever takes the first row for that of the first sample is wrong."""
    loader = DataLoader(TensorDataset(NUMBERED), **options)
    model, _ = recording()
    for predict in (model.predict, lambda *args, **more: [*model.predict_iter(*args, **more)]):
        with pytest.warns(UserWarning, match="which shuffles") as caught:
            predict(loader, verbose=0)
        assert [str(each.message) for each in caught] == [
            "predict returns rows in the order of the DataLoader, which shuffles: the first row is "
            "not that of the first sample. Pass a DataLoader with shuffle=False."
        ]


def test_predictions_in_an_order_that_is_fixed_are_no_reason_for_a_warning():
    """In the order of the loader, whatever it is; evaluation has no order."""
    data = TensorDataset(NUMBERED)
    model, _ = recording()
    for loader in (DataLoader(data), DataLoader(data, sampler=Halves(shuffle=False))):
        model.predict(loader, verbose=0)
    model.evaluate(DataLoader(TensorDataset(NUMBERED, NUMBERED), shuffle=True), verbose=0)


class Many(nn.Module):
    """Takes parts by position and by name."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, left, right):
        out = self.head(torch.cat([left, right], 1))
        return {"out": out, "sum": out.sum(1)}


def joined(prediction, target):
    """A loss over two outputs."""
    return nn.functional.mse_loss(prediction["out"], target["out"]) + nn.functional.mse_loss(
        prediction["sum"], target["sum"]
    )


@pytest.mark.long
def test_nested_structures_train_like_the_loader_of_them():
    """Dicts go by name, tuples and lists by position; the targets keep their structure."""
    x, y = batches(1, 12)[0]
    left, right = x[:, :2], x[:, 2:]
    target = OrderedDict(out=y, sum=y.sum(1))
    forms = [
        (([((left[i : i + 4], right[i : i + 4]), _part(target, i)) for i in (0, 4, 8)],), {}),
        (((left, right), target), {"batch_size": 4, "shuffle": False}),
        (([left, right.numpy()], target), {"batch_size": 4, "shuffle": False}),
        (({"left": left, "right": right}, target), {"batch_size": 4, "shuffle": False}),
        (({"right": right, "left": left}, target), {"batch_size": 4, "shuffle": False}),
    ]
    results = []
    for args, options in forms:
        torch.manual_seed(0)
        model = ipufit.Model(Many())
        model.compile("sgd", joined)
        model.fit(*args, **options, epochs=2, verbose=0)
        results.append(model.module.state_dict())
        predicted = model.predict({"left": left, "right": right}, verbose=0)
        assert predicted["out"].shape == (12, 3)
    for result in results[1:]:
        assert_same_bits(result, results[0])


def _part(target, i):
    return OrderedDict((name, value[i : i + 4]) for name, value in target.items())


@pytest.mark.long
def test_a_module_with_a_loss_of_its_own_takes_arrays():
    """All parts go to forward, with or without y."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x, y):
            out = self.head(x)
            return out, nn.functional.mse_loss(out, y)

    x, y = batches(1, 12)[0]
    states = []
    for args in ((x, y), ({"x": x, "y": y},)):
        torch.manual_seed(0)
        model = ipufit.Model(Own())
        model.compile("sgd")
        model.fit(*args, batch_size=4, seed=1, verbose=0)
        states.append(model.module.state_dict())
        assert model.evaluate(*args, verbose=0)["loss"] > 0
    assert_same_bits(*states)


@pytest.mark.long
def test_a_dataset_larger_than_memory_trains_with_flat_memory(tmp_path):
    """Of a memory-mapped array only the rows of a micro-batch are copied."""
    array = np.lib.format.open_memmap(
        tmp_path / "large.npy", mode="w+", dtype=np.float32, shape=(20000, 256)
    )
    array[:, 0] = 1
    array.flush()
    target = np.zeros((20000, 1), np.float32)
    model = ipufit.Model(nn.Linear(256, 1))
    model.compile("sgd", "mse")
    model.fit(array, target, batch_size=16, steps_per_epoch=2, verbose=0)
    tracemalloc.start()
    try:
        model.fit(array, target, batch_size=16, validation_split=0.1, verbose=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # 20 MB of data; NumPy tells tracemalloc of every array that it allocates.
    assert peak < 4e6


def test_a_batch_never_changes_once_it_is_read():
    """A user who writes into the arrays while an execution is held must not change it."""
    for make in (torch.zeros, lambda *shape: np.zeros(shape, np.float32)):
        x, y = make(4, 1), make(4, 1)
        model, engine = recording()
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
        x[:] = 5
        assert rows(engine.programs[0]) == [0, 0, 0, 0]


def test_a_split_has_keras_sizes_and_is_taken_before_shuffling():
    """The last samples are held out, whatever the order of training."""
    for args, options in (
        ((NUMBERED, NUMBERED), {}),
        ((NUMBERED.numpy(), NUMBERED.numpy()), {}),
        ((TensorDataset(NUMBERED, NUMBERED),), {}),
    ):
        model, engine = recording()
        model.fit(*args, validation_split=0.25, batch_size=3, epochs=2, verbose=0, **options)
        fed = [rows(p) for p in engine.programs if p.executions]
        assert sorted(fed[0]) == sorted([0, 1, 2, 3, 4, 5, 6] * 2)
        assert fed[0] != [0, 1, 2, 3, 4, 5, 6] * 2
        assert fed[1:] == [[7, 8, 9]] * 2
        assert model.history.params["samples"] == 7


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3, 1 / 3, 0.5, 0.7, 0.8])
@pytest.mark.parametrize("samples", [10, 100, 999])
def test_the_size_of_a_split_is_keras_expression(samples, fraction):
    """floor(n * (1 - fraction)) to train on, rounding of floats included."""
    x = torch.zeros(samples, 1)
    model, engine = recording()
    model.fit(x, x, validation_split=fraction, verbose=0)
    assert model.history.params["samples"] == int(np.floor(samples * (1.0 - fraction)))
    held = [p for p in engine.programs if p.executions][1]
    assert len(rows(held)) == samples - model.history.params["samples"]


@pytest.mark.long("ipu-standin")
def test_validation_data_takes_every_form_and_batch_size():
    """Tuples are (x, y) and (x, y, sample_weight) as in Keras; a list is a list of batches."""
    ten = torch.ones(10)
    forms = [
        ((NUMBERED, NUMBERED), [4, 4, 2]),
        ((NUMBERED, NUMBERED, ten), [4, 4, 2]),
        (TensorDataset(NUMBERED, NUMBERED), [4, 4, 2]),
        (Stream(list(zip(NUMBERED, NUMBERED))), [4, 4, 2]),
        (DataLoader(TensorDataset(NUMBERED, NUMBERED), 5), [5, 5]),
        ([(NUMBERED, NUMBERED)], [10]),
    ]
    for validation_data, sizes in forms:
        model, engine = recording()
        model.fit(NUMBERED, NUMBERED, batch_size=4, validation_data=validation_data, verbose=0)
        program = [p for p in engine.programs if p.executions][1]
        assert [b.size for e in program.executions for b in e.micro_batches] == sizes
        weighted = [b.unpack()[3] is not None for e in program.executions for b in e.micro_batches]
        assert all(weighted) == (isinstance(validation_data, tuple) and len(validation_data) == 3)
    model, engine = recording()
    held = {"validation_data": ipufit.Validation((NUMBERED, NUMBERED), batch_size=7)}
    model.fit(NUMBERED, NUMBERED, batch_size=4, verbose=0, **held)
    program = [p for p in engine.programs if p.executions][1]
    assert [b.size for e in program.executions for b in e.micro_batches] == [7, 3]


def test_explain_knows_the_arrays(capsys):
    """What is printed before is what happens."""
    model, _ = recording()
    model.explain(X, batch_size=5)
    assert "One epoch = 37 samples = 8 updates in 8 executions." in capsys.readouterr().out
    model.explain(PAIRS)
    assert "One epoch = 37 samples = 2 updates" in capsys.readouterr().out


@pytest.mark.long("ipu-standin")
def test_workers_of_a_stream_that_share_it_yield_every_sample_once():
    """Each worker has a part, and the parts are one epoch."""
    model, engine = recording()
    model.fit(DataLoader(Shards(10), batch_size=2, num_workers=2), verbose=0)
    assert sorted(rows(engine.programs[0])) == list(range(10))


class Shards(IterableDataset):
    """Looks at get_worker_info, or not."""

    def __init__(self, count, shares=True):
        self.count = count
        self.shares = shares

    def __len__(self):
        return self.count

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker and self.shares else (0, 1)
        for index in range(first, self.count, step):
            yield NUMBERED[index], NUMBERED[index]


def stack_arrays(samples):
    """A collate_fn that makes NumPy arrays."""
    return tuple(np.stack([tensor.numpy() for tensor in column]) for column in zip(*samples))


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("collate", [None, stack_arrays], ids=["tensors", "arrays"])
def test_workers_of_a_stream_that_all_yield_everything_are_refused(collate):
    """torch trains on every sample twice without a word."""
    model, _ = recording()
    loader = DataLoader(Shards(10, False), batch_size=5, num_workers=2, collate_fn=collate)
    with pytest.raises(ipufit.errors.DataError) as caught:
        model.fit(loader, verbose=0)
    assert str(caught.value) == (
        "training data: every sample must come once in an epoch, but the 2 workers of the "
        "DataLoader yield more samples than 10 = Shards.__len__(). Each worker has a copy of "
        "the dataset: let __iter__ yield a part of the samples, chosen by "
        "torch.utils.data.get_worker_info(), or use one worker."
    )


@pytest.mark.long("ipu-standin")
def test_a_number_in_a_batch_may_change():
    """Python scalars are data: a constant in the program would keep the first one."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x, factor):
            return self.weight * x * factor

    ones = torch.ones(2, 1, dtype=torch.float64)
    model = ipufit.Model(Scale())
    model.compile(lambda p: torch.optim.SGD(p, lr=0.125), "mse")
    model.fit([((ones, f), ones) for f in (1.0, 2.0, 4.0)], device_iterations=3, verbose=0)
    weight = 1.0
    for factor in (1.0, 2.0, 4.0):
        weight -= 0.125 * 2 * factor * (weight * factor - 1)
    assert model.module.weight.item() == pytest.approx(weight, abs=1e-14)


@pytest.mark.long("ipu-standin")
def test_the_form_of_the_readers_process_is_kept():
    """worker_init_fn and generator of a loader are used as they are."""
    seen = torch.zeros(2, dtype=torch.int64).share_memory_()

    def init(worker):
        seen[worker] += 1

    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        TensorDataset(NUMBERED, NUMBERED),
        5,
        shuffle=True,
        num_workers=2,
        worker_init_fn=init,
        generator=generator,
    )
    model, engine = recording()
    model.fit(loader, verbose=0)
    assert seen.tolist() == [1, 1]
    twin = torch.Generator().manual_seed(3)
    torch.empty((), dtype=torch.int64).random_(generator=twin)
    assert rows(engine.programs[0]) == torch.randperm(10, generator=twin).tolist()
