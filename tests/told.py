"""Callbacks for the tests of callbacks, and the texts of errors."""

import pytest

from ipufit.callbacks import Callback
from ipufit.errors import ConfigurationError


class Gives(Callback):
    """Puts chosen values into the logs of epochs; an epoch whose value is None has none.

    Args:
        values: by name, one per epoch.
    """

    def __init__(self, **values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        for name, values in self.values.items():
            if values[epoch] is not None:
                logs[name] = values[epoch]


class Executions(Callback):
    """Counts executions."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


class Means(Callback):
    """The mean loss of the epoch so far after every execution."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(logs["loss"])


def message(call, *arguments, kind=ConfigurationError, **options):
    """The text of the error of this kind that a call must raise."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return str(caught.value)


def refused(call, text, kind=ConfigurationError):
    """The call raises an error of this kind with exactly this text."""
    assert message(call, kind=kind) == text
