"""Losses: from what a user passes to ``compile`` to one normal form, :class:`Loss`.

``resolve_loss`` makes it of a name, a callable, a module or several of these. ``named`` has the
losses by name and checks their arguments, ``rules`` what the elements of torch's losses are before
they become one number, ``loss``, ``multi_output`` and ``train_step`` the normal form of one, of one
for each output, and of steps of the user's own. Rooms above use what is exported here.
"""

from ipufit.losses.loss import Loss, Turn, find_loss
from ipufit.losses.named import check_labels, check_loss_value, outside_classes
from ipufit.losses.resolve import resolve_loss
from ipufit.losses.rules import LabelRange, LossTerm
from ipufit.losses.train_step import TrainStep, TurnLoss, check_moves

__all__ = [
    "LabelRange",
    "Loss",
    "LossTerm",
    "TrainStep",
    "Turn",
    "TurnLoss",
    "check_labels",
    "check_loss_value",
    "check_moves",
    "find_loss",
    "outside_classes",
    "resolve_loss",
]
