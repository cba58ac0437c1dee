"""Batches of several shapes on the IPU engine: programs for each, updates of one shape."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ipufit
from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.data import LengthBuckets
from ipufit.poptorch._precision import keep_float64
from tests.training.test_shapes import FORMS, Pooled, close, compiled, loop, sequences, weights


@pytest.fixture(autouse=True)
def _wide():
    """The stand-in computes in float64, so that nothing hides behind rounding."""
    with keep_float64():
        yield


def model_of(**options):
    """A model for the stand-in."""
    module = Pooled().double()
    model = ipufit.Model(module, engine="ipu-standin")
    model.compile(torch.optim.AdamW(module.parameters(), lr=0.01), "mse", **options)
    return model


def reordered(batches, per_update):
    """Updates of one shape in the order in which they are full, then what is left of each shape."""
    waiting, updates = {}, []
    for x, y in batches:
        update = waiting.setdefault(x.shape[1], [])
        update.append((x, y))
        if len(update) == per_update:
            updates.append(waiting.pop(x.shape[1]))
    return [*updates, *waiting.values()]


def by_hand(module, epochs_of_updates):
    """The weights of an eager loop over updates."""
    module = copy.deepcopy(module).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for update in epochs_of_updates:
        samples = sum(len(x) for x, _ in update)
        optimizer.zero_grad()
        for x, y in update:
            (nn.functional.mse_loss(module(x), y) * len(x) / samples).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_one_micro_batch_per_update_keeps_the_order():
    """The weights of a plain loop; smaller batches are filled up as always."""
    model = model_of()
    expected, losses = loop(model.module, sequences(), 1, epochs=2)
    history = model.fit(sequences(), epochs=2, device_iterations=2, verbose=0)
    close(weights(model), expected)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-12)
    assert history.params["recordings"] == len({length for length, _ in FORMS}) == 4


@pytest.mark.parametrize(("accumulation", "replicas"), [(2, 1), (1, 2)])
def test_updates_have_one_shape(accumulation, replicas, capsys):
    """Micro-batches wait for others of their shape, whatever device_iterations is."""
    updates = reordered(sequences(), 2)
    assert [len(update) for update in updates] == [2, 2, 2, 1, 1, 1]
    results = []
    for iterations in (1, 3):
        model = model_of()
        expected = by_hand(model.module, updates * 2)
        history = model.fit(
            sequences(),
            epochs=2,
            ipus=replicas,
            gradient_accumulation=accumulation,
            device_iterations=iterations,
            verbose=0,
        )
        close(weights(model), expected)
        assert history.params["updates_done"] == 2 * len(updates)
        results.append(weights(model))
    assert torch.equal(*results)
    model.explain()
    told = capsys.readouterr().out.replace("\n    ", " ")
    assert "Training is compiled for 4 shapes of batches: (4, 3), (4, 2) in " in told
    assert "they wait for others of their shape" in told


class Ends(ipufit.callbacks.Callback):
    """Ends the run before an execution."""

    def __init__(self, before):
        super().__init__()
        self.before = before

    def on_train_batch_begin(self, batch, logs=None):
        self.before -= 1
        if self.before < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("before", [1, 3, 5, 8])
def test_a_run_goes_on_within_an_epoch(before, tmp_path):
    """What waited when the checkpoint was written is read once more."""
    options = {"epochs": 2, "gradient_accumulation": 2, "seed": 1, "verbose": 0}
    whole = model_of()
    whole.fit(sequences(), **options)
    every = ipufit.Checkpoint(tmp_path, every_updates=1, resume="auto")
    first = model_of()
    with pytest.raises(KeyboardInterrupt):
        first.fit(sequences(), checkpoint=every, callbacks=[Ends(before)], **options)
    second = model_of()
    history = second.fit(sequences(), checkpoint=every, callbacks=[Ends(99)], **options)
    assert history.params["resumed"]["update"] == before
    assert torch.equal(weights(second), weights(whole))
    assert history.history == whole.history.history


def test_programs_are_bounded():
    """As recordings are on the embedded engine."""
    model = model_of(max_recordings=2)
    with pytest.raises(ipufit.errors.DataError, match="at most max_recordings=2, but batches of 3"):
        model.fit(sequences(), verbose=0)


def test_steps_per_epoch_leave_no_room_for_what_waits():
    """An epoch of so many updates can't end with smaller ones for each shape."""
    model = model_of()
    with pytest.raises(ipufit.errors.DataError) as caught:
        model.fit(sequences(), steps_per_epoch=2, gradient_accumulation=2, verbose=0)
    assert str(caught.value) == (
        "training data: all micro-batches of an update on an IPU have the same shape, and with "
        "steps_per_epoch none can wait for others of its shape, but several shapes came. Leave "
        "steps_per_epoch out, pad to one shape in collate_fn, or use engine='embedded'."
    )


class OwnState(list):
    """Batches that go on from a state of their own."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_data_with_a_state_of_its_own_has_no_checkpoint_while_some_wait(tmp_path):
    """Nobody could read again what waits."""
    model = model_of()
    every = ipufit.Checkpoint(tmp_path, every_updates=1)
    with pytest.raises(ipufit.errors.DataError) as caught:
        model.fit(OwnState(sequences()), gradient_accumulation=2, checkpoint=every, verbose=0)
    assert str(caught.value) == (
        "training data: a checkpoint within an epoch needs data that can be read again from the "
        "beginning of the epoch, because micro-batches wait for others of their shape, but this "
        "data resumes from its own state. Pad to one shape in collate_fn, checkpoint at the "
        "ends of epochs, or use engine='embedded'."
    )


class SmallFirst:
    """Batches of one length, of which the first has fewer samples than it says of them all."""

    batch_size = 4

    def __iter__(self):
        return iter([[0, 1], [2, 3, 4, 5], [6, 7, 8, 9]])

    def __len__(self):
        return 3


def test_a_batch_sampler_may_say_how_many_samples_a_batch_has():
    """Where it does, the first batch may be a smaller one."""
    x, y = sequences([(3, 10)])[0]
    pairs = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(pairs, batch_sampler=SmallFirst())
    model = model_of()
    expected, _ = loop(model.module, list(loader), 1)
    history = model.fit(loader, verbose=0)
    assert history.params["micro_batch_size"] == 4
    close(weights(model), expected)


def test_a_batch_larger_than_the_first_is_refused():
    """The first one says how large a micro-batch is."""
    model = model_of()
    with pytest.raises(ipufit.errors.DataError) as caught:
        model.fit(sequences([(3, 2), (3, 4)]), verbose=0)
    assert str(caught.value) == (
        "on an IPU a micro-batch has at most as many samples as the first one, 2, got 4. Use a "
        "fixed batch_size, or engine='embedded'."
    )


def test_the_embedded_engine_agrees_where_nothing_waits():
    """Sorted by length, updates have one shape anyway."""
    batches = sorted(sequences(), key=lambda batch: batch[0].shape[1])
    model, other = model_of(), compiled()
    for each in (model, other):
        each.fit(batches, epochs=2, device_iterations=2, verbose=0)
    close(weights(model), weights(other))


def test_an_update_of_several_shapes_is_no_program():
    """Whoever makes executions without the pipeline is told."""
    model = model_of()
    model.fit(sequences([(3, 4), (3, 4)]), gradient_accumulation=2, verbose=0)
    session = model._session
    plan = dataclasses.replace(session.last_plan, gradient_accumulation=2)
    program = session.build(plan, Mode.TRAIN, 0, "train", False)
    first, second = (MicroBatch.of((x,), {}, y, len(x)) for x, y in sequences([(3, 4), (5, 4)]))
    program.prepare(first)
    with pytest.raises(ipufit.errors.DataError) as caught:
        program.run(CombinedBatch([first, second]))
    session.finish(program)
    assert str(caught.value) == (
        "the micro-batches of an update on an IPU have one shape, but after tensors of shape "
        "(4, 3), (4, 2) some of shape (4, 5), (4, 2) came. Pad them to one shape in collate_fn, or "
        "use engine='embedded'."
    )


def test_one_bucket_pads_to_one_shape_and_one_program():
    """Then samples come in the order of the loader, with several micro-batches in an update too."""
    batches = sequences([(length, 1) for length in (5, 9, 5, 14, 9, 5, 7, 3, 5, 6, 2, 9)])
    pairs = [(tokens[0], y[0]) for tokens, y in batches]
    buckets = LengthBuckets(pairs, batch_size=2, max_recordings=1, shuffle=False)
    loader = DataLoader(pairs, batch_sampler=buckets, collate_fn=buckets.pad)
    padded = [*loader]
    assert {x.shape for x, _ in padded} == {(2, 14)}
    model = model_of(max_recordings=1)
    expected = by_hand(model.module, [padded[i : i + 2] for i in (0, 2, 4)] * 2)
    history = model.fit(loader, epochs=2, gradient_accumulation=2, verbose=0)
    close(weights(model), expected)
    assert history.params["recordings"] == 1
