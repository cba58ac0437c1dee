"""Predictions piece by piece: the same rows, one execution in memory, nothing left behind."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import ConfigurationError, DataError
from tests.faulty import (
    Batches,
    Net,
    Told,
    assert_clean,
    assert_same_bits,
    batches,
    compiled,
    fit,
    loader,
    state,
)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("samples", [1, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("device_iterations", [1, 2, 3])
@pytest.mark.parametrize("ipus", [1, 2])
def test_the_pieces_together_are_what_predict_returns(samples, device_iterations, ipus):
    """Every row once and in order, whatever is left at the end."""
    model = compiled()
    x = torch.randn(samples, 4)
    options = {"batch_size": 2, "device_iterations": device_iterations, "ipus": ipus}
    pieces = list(model.predict_iter(x, **options))
    size = 2 * device_iterations * ipus
    assert [len(piece) for piece in pieces] == [len(part) for part in x.split(size)]
    assert torch.equal(torch.cat(pieces), model.predict(x, verbose=0, **options))


def test_the_structure_is_that_of_the_module():
    """A dict stays a dict."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return {"score": self.head(x), "twice": (x * 2,)}

    model = compiled(Two(), None, optimizer=None)
    x = torch.randn(6, 4)
    pieces = list(model.predict_iter([(part,) for part in x.split(2)]))
    assert [sorted(piece) for piece in pieces] == [["score", "twice"]] * 3
    assert torch.equal(torch.cat([piece["twice"][0] for piece in pieces]), x * 2)


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_holds_the_outputs_of_one_execution(prefetch):
    """A result larger than memory is what this is for."""
    model = compiled()
    alive = []
    for piece in model.predict_iter(torch.randn(12, 4), batch_size=4, prefetch=prefetch):
        gc.collect()
        assert [kept for kept in alive if kept() is not None] == []
        alive.append(weakref.ref(piece))
        del piece
        assert alive[-1]() is None
    assert len(alive) == 3


@pytest.mark.long("ipu-standin")
def test_the_module_is_in_the_mode_of_its_owner_between_pieces():
    """Who looks at it in the loop must not find it in eval mode."""
    net = Net()
    model = compiled(net)
    flags = [module.training for module in net.modules()]
    x = torch.randn(8, 4)
    generator = torch.get_rng_state()
    for _ in model.predict_iter(x, batch_size=4):
        assert [module.training for module in net.modules()] == flags
        assert torch.equal(torch.get_rng_state(), generator)
    assert_clean(model)


def interferences():
    """What changes weights or programs between two pieces."""

    def in_place(model, path):
        with torch.no_grad():
            next(model.module.parameters()).add_(1.0)

    def load(model, path):
        model.save_weights(path)
        model.load_weights(path)

    return {
        "fit": lambda model, path: fit(model),
        "train_on_batch": lambda model, path: model.train_on_batch(*batches(1)[0]),
        "compile": lambda model, path: model.compile("sgd", "mse"),
        "close": lambda model, path: model.close(),
        "in place": in_place,
        "load": load,
    }


@pytest.mark.long
@pytest.mark.parametrize("name", interferences())
def test_other_weights_between_two_pieces_are_an_error(name, tmp_path):
    """Half of the rows of one model and half of another is a wrong result that looks right."""
    model = compiled()
    pieces = model.predict_iter(torch.randn(12, 4), batch_size=4)
    next(pieces)
    interferences()[name](model, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigurationError) as caught:
        next(pieces)
    assert str(caught.value) == (
        "predict_iter must be read to its end before the model changes its weights, is compiled "
        "again or is closed, but that happened. Start another one."
    )
    assert list(pieces) == []
    assert_clean(model)


@pytest.mark.long
def test_looking_between_two_pieces_is_no_change():
    """Evaluating and predicting change no weight."""
    model = compiled()
    x, y = batches(1, 12)[0]
    pieces = model.predict_iter(x, batch_size=4)
    found = [next(pieces)]
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    other = model.predict_iter(x, batch_size=4)
    found.append(next(pieces))
    assert torch.equal(next(other), found[0])
    found.append(next(pieces))
    assert torch.equal(torch.cat(found), model.predict(x, batch_size=4, verbose=0))


@pytest.mark.long
def test_weights_may_change_before_the_first_piece():
    """Nothing has been computed yet."""
    model = compiled()
    x = torch.randn(4, 4)
    pieces = model.predict_iter(x)
    fit(model)
    assert torch.equal(next(pieces), model.predict(x, verbose=0))


@pytest.mark.long
def test_closing_early_frees_threads_and_tells_callbacks():
    """A loop that breaks is a usual end."""
    before = threading.active_count()
    told = Told()
    told.closed = 0

    class Closing(ipufit.callbacks.Callback):
        closed = 0

        def close(self):
            self.closed += 1

    closing = Closing()
    model = compiled()
    pieces = model.predict_iter(
        torch.randn(40, 4), batch_size=4, prefetch=2, callbacks=[told, closing]
    )
    next(pieces)
    pieces.close()
    assert threading.active_count() == before
    assert closing.closed == 1
    assert told.hooks == ["on_predict_begin", "on_predict_batch_begin", "on_predict_batch_end"]
    assert_clean(model)
    assert list(pieces) == []


@pytest.mark.long("ipu-standin")
def test_a_bar_that_is_not_read_to_its_end_is_closed(capsys):
    """An open bar spoils what is printed after it."""
    model = compiled()
    pieces = model.predict_iter(torch.randn(40, 4), batch_size=4, verbose=1)
    next(pieces)
    pieces.close()
    assert capsys.readouterr().err.endswith("\n")


@pytest.mark.long("ipu-standin")
def test_callbacks_hear_of_every_execution():
    """As from predict."""
    ledgers = []
    for call in ("predict", "predict_iter"):
        told = Told()
        model = compiled()
        found = getattr(model, call)(loader(), callbacks=[told], verbose=0, device_iterations=2)
        list(found)
        ledgers.append(told.hooks)
    assert ledgers[0] == ledgers[1]


@pytest.mark.long("ipu-standin")
def test_an_error_of_the_data_comes_where_it_is():
    """The pieces before it are good."""
    items = [batch[0] for batch in batches(2)] + [torch.randn(4, 7)]
    model = compiled()
    pieces = model.predict_iter(Batches(items))
    assert len(next(pieces)) == 4
    assert len(next(pieces)) == 4
    with pytest.raises(DataError):
        next(pieces)
    assert_clean(model)


@pytest.mark.long("ipu-standin")
def test_inside_a_callback_of_fit_the_present_weights_are_used():
    """And training goes on as without it."""
    x = torch.randn(8, 4)
    seen = []

    def look(epoch, logs):
        seen.append(torch.cat(list(model.predict_iter(x, batch_size=4))))

    finals = []
    for callbacks in ([], [ipufit.callbacks.LambdaCallback(on_epoch_end=look)]):
        torch.manual_seed(2)
        model = compiled()
        fit(model, epochs=2, callbacks=callbacks)
        finals.append(state(model))
    assert_same_bits(*finals)
    model.module.eval()
    torch.testing.assert_close(seen[1], model.module(x).detach())
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.long("ipu-standin")
def test_pieces_that_reach_over_an_update_of_fit_are_refused():
    """Opened in one execution and read in the next, they would come of two models."""
    open_pieces = []

    def on_batch(batch, logs):
        if not open_pieces:
            open_pieces.append(model.predict_iter(torch.randn(8, 4), batch_size=4))
        next(open_pieces[0])

    model = compiled()
    with pytest.raises(ConfigurationError, match="predict_iter must be read to its end"):
        fit(model, callbacks=[ipufit.callbacks.LambdaCallback(on_train_batch_end=on_batch)])
    assert_clean(model)


def test_arguments_are_checked_at_the_call():
    """Not when the first piece is asked for, which may be far from it."""
    with pytest.raises(ConfigurationError, match="steps must be"):
        compiled().predict_iter(torch.ones(2, 4), steps=0)
