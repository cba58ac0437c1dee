"""ExperimentLogger: every kind of tracker gets the values of the history, at the right steps."""

import dataclasses

import pytest
import torch

import ipufit
from ipufit.callbacks import Callback, ExperimentLogger
from tests.faulty import batches, compiled, fit
from tests.told import Means, refused


class Calls:
    """Writes down what is called."""

    def __init__(self):
        self.calls = []

    def note(self, name, *args):
        self.calls.append((name, *args))

    def __repr__(self):
        return f"<{type(self).__name__}>"


class OfLightning(Calls):
    def log_metrics(self, metrics, step=None):
        self.note("log", metrics, step)

    def log_hyperparams(self, params):
        self.note("describe", params)

    def save(self):
        self.note("save")

    def finalize(self, status):
        self.note("end", status)


class OfMLflow(Calls):
    def log_metrics(self, metrics, step=None, synchronous=None):
        self.note("log", metrics, step)

    def log_params(self, params, synchronous=None):
        self.note("describe", params)


class OfComet(Calls):
    def log_metrics(self, dic, prefix=None, step=None, epoch=None):
        self.note("log", dic, step)

    def log_parameters(self, parameters, prefix=None):
        self.note("describe", parameters)


class OfAccelerate(Calls):
    config = None

    def log(self, values, step=None):
        self.note("log", values, step)

    def store_init_configuration(self, values):
        self.note("describe", values)


class OfWandb(Calls):
    def log(self, data, step=None):
        self.note("log", data, step)

    @property
    def config(self):
        return self

    def update(self, found, allow_val_change=None):
        assert allow_val_change
        self.note("describe", found)


def logged(tracker):
    return [call[1:] for call in tracker.calls if call[0] == "log"]


def described(tracker):
    return [call[1] for call in tracker.calls if call[0] == "describe"]


@pytest.mark.long("ipu-standin")
@pytest.mark.few("OfComet", "OfAccelerate")
@pytest.mark.parametrize("kind", [OfLightning, OfMLflow, OfComet, OfAccelerate, OfWandb])
def test_every_kind_of_tracker_gets_the_history(kind):
    """Under its names, with the rate and the index of the epoch, over weight updates."""
    tracker = kind()
    history = fit(
        compiled(),
        batches(3),
        epochs=2,
        device_iterations=2,
        validation_data=batches(1),
        callbacks=[ExperimentLogger(tracker)],
    )
    assert logged(tracker) == [
        (
            {
                "loss": history.history["loss"][epoch],
                "val_loss": history.history["val_loss"][epoch],
                "learning_rate": 0.05,
                "epoch": epoch,
            },
            3 * (epoch + 1),
        )
        for epoch in range(2)
    ]
    (told,) = described(tracker)
    assert tracker.calls[0] == ("describe", told)
    assert (
        told.items()
        >= {
            "epochs": 2,
            "seed": 7,
            "device_iterations": 2,
            "optimizer": "SGD",
            "learning_rate": 0.05,
        }.items()
    )
    assert not {"verbose", "metrics", "directions", "adds", "updates_done"} & set(told)


@pytest.mark.long("ipu-standin")
def test_a_function_gets_the_values_and_the_step():
    """For whatever else there is."""
    calls = []
    history = fit(
        compiled(), batches(3), callbacks=[ExperimentLogger(lambda *args: calls.append(args))]
    )
    expected = {"loss": history.history["loss"][0], "learning_rate": 0.05, "epoch": 0}
    assert calls == [(expected, 3)]


@pytest.mark.long("ipu-standin")
def test_every_so_many_updates():
    """The means so far have names of their own: at the end of an epoch both share a step."""
    tracker, means = OfMLflow(), Means()
    logger = ExperimentLogger(tracker, every_updates=2)
    assert logger.every_updates == 2
    history = fit(
        compiled(), batches(4), epochs=2, device_iterations=4, callbacks=[means, logger]
    ).history
    assert len(means.values) == 4
    found = [(sorted(values), values["epoch"], step) for values, step in logged(tracker)]
    of_update, of_epoch = ["batch_loss", "epoch"], ["epoch", "learning_rate", "loss"]
    assert found == [
        (of_update, 0, 2),
        (of_update, 0, 4),
        (of_epoch, 0, 4),
        (of_update, 1, 6),
        (of_update, 1, 8),
        (of_epoch, 1, 8),
    ]
    losses = [values["batch_loss"] for values, _ in logged(tracker) if "batch_loss" in values]
    assert losses == means.values
    assert losses[1::2] == history["loss"]


@pytest.mark.long("ipu-standin")
def test_steps_go_on_over_several_fits_and_an_evaluation():
    """No step comes before an earlier one; what the run is made with is told once."""
    tracker = OfWandb()
    logger = ExperimentLogger(tracker)
    model = compiled()
    for _ in range(2):
        fit(model, batches(3), callbacks=[logger])
    value = model.evaluate(batches(1), callbacks=[logger], verbose=0)["loss"]
    assert [step for _, step in logged(tracker)] == [3, 6, 6]
    assert logged(tracker)[-1] == ({"evaluation_loss": value}, 6)
    assert len(described(tracker)) == 1


@pytest.mark.long
def test_a_run_that_goes_on_continues_its_steps(tmp_path):
    """In another process too: the count is in the checkpoint, and the run is not told again."""
    checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=2)
    first, second, third = OfMLflow(), OfMLflow(), OfMLflow()
    options = {"checkpoint": dataclasses.replace(checkpoint, resume="auto")}
    fit(compiled(), batches(3), callbacks=[ExperimentLogger(first)], **options)
    fit(compiled(), batches(3), epochs=2, callbacks=[ExperimentLogger(second)], **options)
    assert [step for _, step in logged(first) + logged(second)] == [3, 6]
    assert (len(described(first)), len(described(second))) == (1, 0)
    told = ExperimentLogger(third, log_params=True)
    fit(compiled(), batches(3), epochs=3, callbacks=[told], **options)
    assert [step for _, step in logged(third)] == [9]
    assert described(third)[0]["epochs"] == 3


@pytest.mark.long("ipu-standin")
def test_it_may_be_told_nothing_of_the_run():
    """log_params=False."""
    tracker = OfMLflow()
    fit(compiled(), batches(1), callbacks=[ExperimentLogger(tracker, log_params=False)])
    assert described(tracker) == []
    assert len(logged(tracker)) == 1


class Fails(Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("no")


@pytest.mark.long("ipu-standin")
def test_a_logger_of_lightning_writes_each_time_and_learns_the_end():
    """As by Lightning's Trainer."""
    tracker = OfLightning()
    logger, model = ExperimentLogger(tracker), compiled()
    fit(model, batches(1), callbacks=[logger])
    names = [call[0] for call in tracker.calls]
    assert names == ["describe", "log", "save", "end"]
    try:
        raise ValueError
    except ValueError:  # an error that is being handled is not one of fit
        fit(model, batches(1), callbacks=[logger])
    with pytest.raises(RuntimeError, match="no"):
        fit(model, batches(1), callbacks=[logger, Fails()])
    ends = [call[1] for call in tracker.calls if call[0] == "end"]
    assert ends == ["success", "success", "failed"]


@pytest.mark.long("ipu-standin")
def test_a_trial_run_leaves_it_alone():
    """fast_dev_run, which says so."""
    tracker = OfMLflow()
    history = fit(
        compiled(),
        batches(3),
        loading=ipufit.Loading(fast_dev_run=True),
        callbacks=[ExperimentLogger(tracker)],
    )
    assert tracker.calls == []
    assert history.params["left_out_callbacks"] == ["ExperimentLogger"]


@pytest.mark.long
def test_what_a_tracker_raises_ends_training_before_it_begins():
    """Where it refuses the run."""

    class Closed(OfMLflow):
        def log_params(self, params, synchronous=None):
            raise RuntimeError("the run has ended")

    model, tracker = compiled(), Closed()
    logger = ExperimentLogger(tracker)
    before = model.module.body.weight.detach().clone()
    with pytest.raises(RuntimeError, match="the run has ended"):
        fit(model, batches(1), callbacks=[logger])
    assert torch.equal(model.module.body.weight, before)
    value = model.evaluate(batches(1), callbacks=[logger], verbose=0)["loss"]
    assert logged(tracker) == [({"evaluation_loss": value}, 0)]


WANTED = (
    "logger of ExperimentLogger must be a Lightning logger, the mlflow module, a Comet "
    "experiment, a W&B run, an Accelerate tracker or a function of values and step, got "
)


def test_what_is_no_tracker_is_refused():
    """When it is made."""
    refused(
        lambda: ExperimentLogger(OfMLflow), WANTED + "the class OfMLflow. Pass an object of it."
    )
    refused(
        lambda: ExperimentLogger("runs"),
        WANTED
        + ("'runs'. For any other logger, pass a function that logs: lambda values, step: ..."),
    )


def test_a_wrong_argument_is_named():
    """When it is made."""
    refused(
        lambda: ExperimentLogger(print, every_updates=0),
        "every_updates of ExperimentLogger must be an integer of at least 1, got 0.",
    )
    refused(
        lambda: ExperimentLogger(print, log_params="all"),
        "log_params of ExperimentLogger must be one of None, True, False, got 'all'.",
    )


def test_a_tracker_that_is_passed_as_a_callback_is_told_what_to_do():
    """Lightning's Trainer has an argument for them."""
    refused(
        lambda: fit(compiled(), batches(1), callbacks=[OfLightning()]),
        "callbacks must be a list of ipufit.callbacks.Callback objects, got <OfLightning>. Pass "
        "ipufit.callbacks.ExperimentLogger(...) of it.",
    )
