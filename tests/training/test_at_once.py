"""Several runs in one process, and copies of a process that is training."""

import os
import threading

import pytest
import torch

import ipufit
from ipufit.callbacks import Callback
from ipufit.utils import state as state_module
from tests.checkpoint.test_resume import Case, assert_same, state
from tests.fitting import skipping_refusals
from tests.nets import CNN, MLP

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")


@pytest.mark.long("ipu-standin")
def test_two_fits_in_two_threads_have_the_bits_of_two_in_turn(tmp_path):
    """With random numbers and checkpoints, of which torch and the process have one each."""
    cases = [
        Case(MLP, seed=6, loading=ipufit.Loading(prefetch=1)),
        Case(CNN, seed=7, ipus=2),
    ]
    together = threading.Barrier(len(cases))
    made = {}

    class Meets(Callback):
        def on_train_begin(self, logs=None):
            together.wait()

    def model_of(case):
        torch.manual_seed(3)
        model = ipufit.Model(case.net().double())
        with skipping_refusals():
            model.compile("adam", "cross_entropy", metrics=["accuracy"])
        return model

    def fit(number, model, **options):
        case = cases[number]
        with skipping_refusals():
            model.fit(case.train(), **case.fit, **options)
        made[number] = model

    expected = []
    for number, case in enumerate(cases):
        fit(number, model_of(case))
        expected.append(state(made.pop(number)))
    threads = []
    for number, case in enumerate(cases):
        options = {"callbacks": [Meets()], "checkpoint": tmp_path / str(number)}
        arguments = (number, model_of(case))
        threads.append(threading.Thread(target=fit, args=arguments, kwargs=options))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, wanted in enumerate(expected):
        assert_same(made[number], wanted)


class Turns(threading.Condition):
    """Notes that a thread has to wait for its turn."""

    def __init__(self):
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout=None):
        self.waits.set()
        return super().wait(timeout)


@pytest.fixture
def turns(monkeypatch):
    """By which threads take turns."""
    turns = Turns()
    monkeypatch.setattr(state_module, "_CHANGE", turns)
    return turns


class StartsAnother(Callback):
    """Calls ``predict`` of the same model in another thread, as a server of predictions does."""

    def __init__(self, model, x, turns=None):
        super().__init__()
        self.predicting, self.x, self.turns = model, x, turns
        self.came = []
        self.thread = threading.Thread(target=self.predict)

    def predict(self):
        try:
            self.came.append(self.predicting.predict(self.x, batch_size=2, verbose=0))
        except ipufit.errors.ConfigurationError as error:
            self.came.append(str(error))

    def on_predict_begin(self, logs=None):
        self.thread.start()
        assert self.turns.waits.wait(60)
        assert self.came == []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            self.thread.start()
            self.thread.join()


X = torch.linspace(-1, 1, 24).reshape(6, 4)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def normalized():
    """A model that computes something else in train mode."""
    torch.manual_seed(5)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    return ipufit.Model(layers)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_threads_take_turns_to_predict_with_a_model(is_compiled, turns):
    """Some results were tensors of a recording, or those of train mode, which it then stayed in."""
    model = normalized()
    if is_compiled:
        model.compile("sgd", "cross_entropy")
    other = StartsAnother(model, X, turns)
    outputs = model.predict(X, callbacks=other, batch_size=2, verbose=0)
    other.thread.join()
    assert model.module.training
    expected = normalized().module.eval()(X)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(other.came[0], expected)


def test_threads_take_turns_to_run_a_layer_of_two_models(turns):
    """A recording of one model has put others in the place of the layer's weights."""
    model = normalized()
    other = StartsAnother(ipufit.Model(torch.nn.Sequential(model.module[0])), X, turns)
    outputs = model.predict(X, callbacks=other, batch_size=2, verbose=0)
    other.thread.join()
    torch.testing.assert_close(outputs, normalized().module.eval()(X))
    torch.testing.assert_close(other.came[0], normalized().module[0](X))


def test_a_prediction_in_another_thread_does_not_end_a_fit():
    """It took the weights away from fit, which ended by an error of the user's module."""
    trained = []
    for number in range(2):
        model = normalized()
        model.compile("sgd", "cross_entropy")
        other = StartsAnother(model, X)
        model.fit(X, Y, batch_size=2, callbacks=[other] * number, seed=1, verbose=0)
        trained.append(model.module.state_dict())
    assert other.came == [
        "one thread at a time can run a module, but another one runs this Sequential or a part of "
        "it. Wait for it, or use a copy of it."
    ]
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


class Forks(Callback):
    """Makes a copy of the process in the middle of training, which raises what comes of it."""

    def __init__(self):
        super().__init__()
        self.process = self.parent = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4 and self.process is None:
            self.parent = os.getpid()
            self.process = os.fork()


@pytest.mark.few("1")
@pytest.mark.long("ipu-standin")
@forks
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_copy_of_the_process_does_not_go_on(prefetch, tmp_path):
    """It has no threads, and would write the same files; the one that was copied is unharmed."""
    case = Case(MLP, seed=5, loading=ipufit.Loading(prefetch=prefetch))
    told = tmp_path / "told"
    callback = Forks()
    try:
        model = case.run(callbacks=[callback], checkpoint=tmp_path / "run")
    except Exception as error:
        if os.getpid() == callback.parent:
            raise
        told.write_text(f"{type(error).__name__}: {error}")
        os._exit(3)
    if os.getpid() != callback.parent:
        os._exit(4)
    assert os.WEXITSTATUS(os.waitpid(callback.process, 0)[1]) == 3
    assert told.read_text() == (
        f"ConfigurationError: a run continues in the process that started it ({callback.parent}), "
        f"but this is a forked copy ({callback.process}). End the copy with os._exit, or start "
        "other processes with spawn."
    )
    assert_same(model, state(case.run()))
