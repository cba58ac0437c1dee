"""Losses: from what a user passes to ``compile`` to one normal form, :class:`Loss`.

``resolve_loss`` makes it of a name, a callable, a module or several of these. ``named`` has the
losses by name and checks their arguments, ``rules`` what the elements of torch's losses are before
they become one number, ``loss`` and ``multi_output`` the normal form of one and of several. Rooms
above use what is exported here.
"""

from ipufit.losses.loss import Loss, find_loss
from ipufit.losses.named import check_labels, check_loss_value, outside_classes
from ipufit.losses.resolve import resolve_loss
from ipufit.losses.rules import LabelRange, LossTerm

__all__ = [
    "LabelRange",
    "Loss",
    "LossTerm",
    "check_labels",
    "check_loss_value",
    "find_loss",
    "outside_classes",
    "resolve_loss",
]
