"""Timer: what each stage took, and the end of training when the time is up."""

import datetime
import types

import pytest

from ipufit.callbacks import Callback, Timer
from tests.faulty import Told, batches, compiled, fit
from tests.told import refused


class Clock:
    """Goes on only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(
            "ipufit.callbacks.stopping.time", types.SimpleNamespace(monotonic=lambda: self.now)
        )


class Takes(Callback):
    """Makes a hook last."""

    def __init__(self, clock, hook, seconds):
        super().__init__()

        def last(*_):
            clock.now += seconds

        setattr(self, hook, last)


@pytest.mark.long
@pytest.mark.parametrize(("di", "updates"), [(1, 3), (2, 4), (5, 5)])
def test_training_ends_with_the_execution_in_which_the_time_runs_out(
    monkeypatch, capsys, di, updates
):
    """No execution is cut, none is begun afterwards."""
    clock = Clock(monkeypatch)
    timer = Timer(3, verbose=1)
    ends = []

    class Count(Callback):
        def on_train_batch_end(self, batch, logs=None):
            clock.now += batch + 1 - (ends[-1] if ends else 0)
            ends.append(batch + 1)

    history = fit(
        compiled(), batches(10), epochs=4, device_iterations=di, callbacks=[Count(), timer]
    )
    assert ends[-1] == updates
    assert history.epoch == [0]
    assert timer.time_elapsed() == updates
    assert timer.time_remaining() == 0
    assert capsys.readouterr().err == f"Timer ends training after {updates}.0 s\n"


@pytest.mark.long("ipu-standin")
def test_the_end_of_an_epoch_is_a_boundary_too(monkeypatch, capsys):
    """Validation takes time of its own."""
    clock = Clock(monkeypatch)
    timer = Timer(5.0)
    callbacks = [Takes(clock, "on_test_batch_end", 2), timer]
    history = fit(compiled(), batches(2), epochs=9, validation_data=batches(2), callbacks=callbacks)
    assert history.epoch == [0, 1]
    assert timer.time_elapsed("validate") == timer.time_elapsed() == 8
    assert capsys.readouterr() == ("", "")


@pytest.mark.long("ipu-standin")
def test_stages_are_measured_apart(monkeypatch):
    """Each fit, evaluation and prediction begins anew."""
    clock = Clock(monkeypatch)
    timer = Timer()
    model = compiled()
    slow = [
        Takes(clock, "on_train_batch_end", 1),
        Takes(clock, "on_test_batch_end", 10),
        Takes(clock, "on_predict_batch_end", 100),
    ]
    for _ in range(2):
        fit(model, batches(3), validation_data=batches(2), callbacks=[timer, *slow])
        model.evaluate(batches(4), callbacks=[timer, *slow], verbose=0)
        model.predict(batches(5), callbacks=[timer, *slow], verbose=0)
    spent = [timer.time_elapsed(s) for s in ("train", "validate", "evaluate", "predict")]
    assert spent == [23, 20, 40, 500]
    assert timer.time_elapsed() == 23
    assert timer.time_remaining() is None
    clock.now += 50
    assert timer.time_elapsed() == 23


@pytest.mark.long("ipu-standin")
def test_it_can_be_read_while_it_runs(monkeypatch):
    """And an error stops the clock."""
    clock = Clock(monkeypatch)
    timer = Timer(100)
    left = []

    def look(told, last):
        left.append(timer.time_remaining())
        if last == 1:
            raise LookupError

    callbacks = [Takes(clock, "on_train_batch_end", 30), Told(on_train_batch_end=look), timer]
    with pytest.raises(LookupError):
        fit(compiled(), batches(9), callbacks=callbacks)
    assert left == [70, 40]
    clock.now += 5
    assert timer.time_elapsed() == 60


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("00:12:00:00", 43200.0),
        ("1:02:03:04", 93784.0),
        (datetime.timedelta(minutes=2), 120.0),
        (None, None),
    ],
)
def test_forms_of_a_duration(duration, seconds):
    """Lightning's text among them."""
    assert Timer(duration).duration == seconds


@pytest.mark.parametrize("duration", ["12:00", "1h", "00:12:00:0", "-1:00:00:00"])
def test_a_text_that_is_no_duration_is_refused(duration):
    """Hours taken for minutes would cost a night."""
    refused(
        lambda: Timer(duration),
        "duration of Timer as a text must be 'days:hours:minutes:seconds', got "
        f"{duration!r}. Twelve hours are '00:12:00:00'.",
    )


def test_a_wrong_argument_is_named():
    """When it is made."""
    text = "duration of Timer must be a finite number of at least 0.0, got -1."
    refused(lambda: Timer(-1), text)
    refused(lambda: Timer(1, verbose=3), "verbose of Timer must be 0 or 1, got 3.")
    refused(
        lambda: Timer().time_elapsed("test"),
        "stage of Timer must be one of 'train', 'validate', 'evaluate', 'predict', got 'test'.",
    )
