"""No sample is lost or counted twice, and what the plan says is what happens."""

import math
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ipufit
from ipufit.core.batch import Mode
from ipufit.testing import RecordingEngine
from tests.nets import MLP, data


def recording(**compile_options):
    """A model on the recording engine, and the engine."""
    engine = RecordingEngine()
    model = ipufit.Model(nn.Linear(1, 1), engine=lambda: engine)
    model.compile("sgd", "mse", **compile_options)
    return model, engine


def numbered(n, batch_size, **options):
    """A loader whose sample ``i`` holds the number ``i``."""
    x = torch.arange(n, dtype=torch.float32).unsqueeze(1)
    return DataLoader(TensorDataset(x, x), batch_size=batch_size, **options)


def seen(program):
    """The numbers that a program was fed, in order."""
    leaves = [b.leaves[0] for e in program.executions for b in e.micro_batches]
    return torch.cat(leaves).flatten().tolist()


class Ledger(ipufit.callbacks.Callback):
    """Writes down every hook."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(*args):
            index = args[0] if args and isinstance(args[0], int) else None
            self.calls.append((name, index))

        return hook


@pytest.mark.long("ipu-standin")
@pytest.mark.grid
@pytest.mark.parametrize("seed", range(30))
def test_the_plan_is_what_happens(seed):
    """Planned updates, executions and tail equal those observed, for random plans."""
    rng = random.Random(seed)
    model, engine = recording()
    for _ in range(100):
        mb, ga, di = rng.randint(1, 7), rng.randint(1, 4), rng.randint(1, 6)
        replicas, n = rng.choice([1, 2, 4, 8]), rng.randint(1, 160)
        drop_last = rng.random() < 0.2 and n >= mb
        x = torch.arange(n, dtype=torch.float32).unsqueeze(1)
        loader = DataLoader(TensorDataset(x, x), batch_size=mb, drop_last=drop_last)
        engine.programs.clear()
        before = model._session.updates
        model.fit(
            loader,
            ipus=replicas,
            gradient_accumulation=ga,
            device_iterations=di,
            seed=0,
            verbose=0,
        )
        (program,) = engine.programs
        plan = program.spec.plan
        used = n - n % mb if drop_last else n
        assert seen(program) == list(range(used))
        assert (plan.samples, plan.dropped) == (used, n - used)
        assert len(program.executions) == plan.executions_per_epoch
        assert program.updates - before == plan.updates_per_epoch
        assert program.updates - before == model.history.params["updates"]
        sizes = [execution.samples for execution in program.executions]
        full = [plan.combined_batch_size] * (used // plan.combined_batch_size)
        assert sizes == full + ([plan.tail.samples] if plan.tail else [])
        for execution in program.executions:
            count = len(execution.micro_batches)
            assert count <= plan.micro_batches_per_execution
            for index, micro_batch in enumerate(execution.micro_batches):
                first = (
                    micro_batch.leaves[0][0].item() - execution.micro_batches[0].leaves[0][0].item()
                )
                place = plan.place(int(first))
                assert place.replica == index % replicas
                assert place.accumulation == index // replicas % ga
                assert place.iteration == index // (replicas * ga)
        assert program.closed == 1


@pytest.mark.long("ipu-standin")
@pytest.mark.grid
@pytest.mark.parametrize("seed", range(20))
def test_evaluate_and_predict_see_every_sample_once(seed):
    """Padding or dropping in inference would make wrong metrics without an error."""
    rng = random.Random(seed)
    model, engine = recording(metrics=["mse"])
    for _ in range(30):
        mb, di, n = rng.randint(1, 7), rng.randint(1, 6), rng.randint(1, 100)
        work = {"ipus": rng.choice([1, 2, 4]), "device_iterations": di, "verbose": 0}
        engine.programs.clear()
        # The recording engine echoes the input, which is the target.
        assert model.evaluate(numbered(n, mb), **work) == {"loss": 0.0, "mse": 0.0}
        predicted = model.predict(numbered(n, mb), **work)
        assert predicted.flatten().tolist() == list(range(n))
        evaluation, prediction = engine.programs
        assert seen(evaluation) == seen(prediction) == list(range(n))
        assert [p.spec.mode for p in engine.programs] == [Mode.EVALUATE, Mode.PREDICT]


@pytest.mark.long("ipu-standin")
def test_hooks_fire_once_per_execution_with_keras_indices():
    """A callback that counts must count right whatever device_iterations is."""
    model, _ = recording()
    for di, ends in ((1, [0, 1, 2, 3, 4, 5, 6]), (3, [2, 5, 6]), (100, [6])):
        ledger = Ledger()
        # 7 updates of 2 x 2 samples, the last with one sample; validation in 2 x 2 forward passes.
        model.fit(
            numbered(25, 2),
            gradient_accumulation=2,
            device_iterations=di,
            validation_data=ipufit.Validation(numbered(7, 2), device_iterations=2),
            callbacks=[ledger],
            epochs=2,
            verbose=0,
        )
        starts = [0, *(end + 1 for end in ends[:-1])]
        batches = [
            call
            for start, end in zip(starts, ends)
            for call in (("on_train_batch_begin", start), ("on_train_batch_end", end))
        ]
        validation = [
            ("on_test_begin", None),
            ("on_test_batch_begin", 0),
            ("on_test_batch_end", 1),
            ("on_test_batch_begin", 2),
            ("on_test_batch_end", 3),
            ("on_test_end", None),
        ]
        epochs = [
            call
            for epoch in range(2)
            for call in (
                ("on_epoch_begin", epoch),
                *batches,
                *validation,
                ("on_epoch_end", epoch),
            )
        ]
        assert ledger.calls == [("on_train_begin", None), *epochs, ("on_train_end", None)]


def test_hooks_of_evaluate_and_predict():
    """The same callbacks serve outside fit."""
    model, _ = recording()
    ledger = Ledger()
    model.evaluate(numbered(7, 2), ipus=2, callbacks=[ledger], verbose=0)
    model.predict(numbered(7, 2), device_iterations=3, callbacks=[ledger], verbose=0)
    assert ledger.calls == [
        ("on_test_begin", None),
        ("on_test_batch_begin", 0),
        ("on_test_batch_end", 0),
        ("on_test_batch_begin", 1),
        ("on_test_batch_end", 1),
        ("on_test_end", None),
        ("on_predict_begin", None),
        ("on_predict_batch_begin", 0),
        ("on_predict_batch_end", 2),
        ("on_predict_batch_begin", 3),
        ("on_predict_batch_end", 3),
        ("on_predict_end", None),
    ]


def test_stop_training_takes_effect_with_the_execution():
    """Keras' way to stop; the epoch that was cut short is still in History."""

    class Stop(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch >= 3

    model, engine = recording()
    history = model.fit(
        numbered(20, 2), device_iterations=2, epochs=5, callbacks=[Stop()], verbose=0
    )
    assert engine.programs[0].updates == 4
    assert history.params["updates_done"] == 4
    assert history.epoch == [0]
    assert model.fit(numbered(20, 2), epochs=2, verbose=0).epoch == [0, 1]


class Stream(IterableDataset):
    """Numbers of a stream; every worker yields a part of them."""

    def __init__(self, n):
        super().__init__()
        self.n = n

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(worker, self.n, workers):
            value = torch.tensor([float(number)])
            yield value, value


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_and_workers_lose_nothing(workers):
    """Each worker ends with a short batch of its own, in the middle of the epoch."""
    model, engine = recording()
    loader = DataLoader(Stream(29), batch_size=4, num_workers=workers)
    model.fit(loader, ipus=2, device_iterations=2, verbose=0)
    assert sorted(seen(engine.programs[0])) == list(range(29))


@pytest.mark.long("ipu-standin")
def test_short_batches_in_the_middle_count_by_their_samples():
    """An update is the mean over its samples even when a loader yields uneven batches."""
    x, y = data(11)
    parts = [(x[:4], y[:4]), (x[4:5], y[4:5]), (x[5:9], y[5:9]), (x[9:], y[9:])]
    net, other = MLP().double(), MLP().double()
    other.load_state_dict(net.state_dict())
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "cross_entropy")
    history = model.fit(parts, gradient_accumulation=2, verbose=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    total = 0.0
    for rows in (slice(0, 5), slice(5, 11)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(other(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y[rows])
    for value, wanted in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
    assert history.history["loss"] == [pytest.approx(total / 11, abs=1e-12)]


def test_the_users_sampler_collate_and_workers_are_kept():
    """Wrapping or rebuilding a loader is how samples get lost; ours is the user's object."""
    order = [5, 3, 1, 0, 2, 4, 6]

    def doubled(samples):
        x = torch.stack([a for a, _ in samples])
        return 2 * x, x

    model, engine = recording()
    loader = numbered(7, 2, sampler=order, collate_fn=doubled)
    model.fit(loader, device_iterations=2, epochs=2, verbose=0)
    assert seen(engine.programs[0]) == [2.0 * i for i in order] * 2

    x = torch.arange(6.0).unsqueeze(1)
    batched = DataLoader(TensorDataset(x, x), batch_sampler=[[4, 5], [0, 1], [3, 2]])
    model.fit(batched, ipus=2, verbose=0)
    assert seen(engine.programs[1]) == [4, 5, 0, 1, 3, 2]
    assert model.history.params["updates"] == 2

    generator = torch.Generator().manual_seed(3)
    expected = list(numbered(20, 4, shuffle=True, generator=torch.Generator().manual_seed(3)))
    model.fit(numbered(20, 4, shuffle=True, generator=generator), verbose=0)
    assert seen(engine.programs[2]) == torch.cat([a for a, _ in expected]).flatten().tolist()


def test_batches_made_by_the_dataset():
    """batch_size=None hands the dataset's own batches through."""

    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            x = torch.arange(2.0).unsqueeze(1) + 2 * index
            return x, x

    model, engine = recording()
    model.fit(DataLoader(Batches(), batch_size=None), ipus=2, verbose=0)
    assert seen(engine.programs[0]) == [0, 1, 2, 3, 4, 5]
    assert engine.programs[0].spec.plan.micro_batch_size == 2


def test_numbers_and_arrays_in_a_batch_are_data():
    """A Python number in a batch must not be frozen into the program."""
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x, factor):
            return self.weight * x * factor

    model = ipufit.Model(Scale())
    model.compile("sgd", "mse")
    x = torch.ones(2, 1, dtype=torch.float64)
    batches = [((x, 2.0), x.numpy()), ((x, 3.0), x.numpy())]
    predicted = model.predict(batches, verbose=0)
    assert predicted.flatten().tolist() == [2, 2, 3, 3]


def test_drop_last_is_respected_and_reported(capsys):
    """The user asked for it, and is told what it costs."""
    model, engine = recording()
    loader = numbered(23, 4, drop_last=True)
    model.fit(loader, verbose=0)
    assert seen(engine.programs[0]) == list(range(20))
    assert model.history.params["dropped_samples"] == 3
    assert model.history.params["samples"] == 20
    model.explain()
    assert "drop_last=True leaves out 3 more samples per epoch" in capsys.readouterr().out


@pytest.mark.long("ipu-standin")
def test_the_epoch_loss_is_the_mean_over_all_samples():
    """Not that of the last micro-batch, nor the mean of unequal means."""
    x, y = data(10)
    net = MLP().double()
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.0), "cross_entropy")
    for mb, work in ((3, {"ipus": 2, "device_iterations": 2}), (10, {}), (4, {"ipus": 4})):
        loader = DataLoader(TensorDataset(x, y), batch_size=mb)
        loss = model.fit(loader, validation_data=loader, verbose=0, **work).history
        expected = nn.functional.cross_entropy(net(x), y).item()
        assert loss["loss"] == [pytest.approx(expected, abs=1e-12)]
        assert loss["val_loss"] == [pytest.approx(expected, abs=1e-12)]


@pytest.mark.long("ipu-standin")
def test_running_logs_are_means_so_far():
    """What a callback sees after an execution is exact for the samples so far."""
    x, y = data(10)
    net = MLP().double()
    logs = []

    class Keep(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs_=None):
            logs.append(dict(logs_))
            assert logs_["loss"] == logs[-1]["loss"]
            assert len(logs_) == 4

    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.0), "cross_entropy", metrics=["accuracy"])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    model.fit(loader, device_iterations=2, callbacks=[Keep()], verbose=0)
    assert [entry["samples"] for entry in logs] == [4, 8, 10]
    assert [entry["updates"] for entry in logs] == [2, 4, 5]
    for entry in logs:
        rows = slice(0, entry["samples"])
        expected = nn.functional.cross_entropy(net(x[rows]), y[rows]).item()
        assert entry["loss"] == pytest.approx(expected, abs=1e-12)
        right = (net(x[rows]).argmax(1) == y[rows]).double().mean().item()
        assert entry["accuracy"] == pytest.approx(right)
    assert math.isclose(logs[-1]["loss"], model.history.history["loss"][0])


def test_epochs_as_a_range_are_keras_initial_epoch():
    """``epochs`` is the index to stop before, not a count."""
    model, engine = recording()
    assert model.fit(numbered(4, 2), epochs=range(3, 5), verbose=0).epoch == [3, 4]
    assert engine.programs[0].updates == 4


def test_a_callback_that_asks_for_every_third_update_splits_executions():
    """It would hear of the fourth instead; the count goes on over the end of an epoch."""

    class Third(ipufit.callbacks.Callback):
        every_updates = 3

        def __init__(self):
            super().__init__()
            self.done = []

        def on_train_batch_end(self, batch, logs=None):
            self.done.append(batch + 1)

    third = Third()
    model, engine = recording()
    model.fit(numbered(20, 2), device_iterations=4, epochs=2, callbacks=[third], verbose=0)
    assert third.done == [3, 6, 9, 10, 2, 5, 8, 10]
    assert [len(batch.micro_batches) for batch in engine.programs[0].executions] == [
        *(3, 3, 3, 1),
        *(2, 3, 3, 2),
    ]
