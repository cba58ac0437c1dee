"""Losses: from what a user passes to ``compile`` to one normal form, :class:`Loss`.

``resolve_loss`` makes it of a name, a callable, a module or several of these; ``named`` has the
losses by name, ``rules`` what their reductions mean for a smaller batch, ``unreduced``, ``masked``
and ``batched`` how samples are weighted, left out or computed together, and ``checks`` what a
trace can check of the arguments and the value. Rooms above use what is exported here.
"""

from ipufit.losses.checks import check_labels, check_loss_value
from ipufit.losses.loss import Loss
from ipufit.losses.module_loss import find_loss
from ipufit.losses.resolve import resolve_loss
from ipufit.losses.unreduced import LabelRange, LossTerm

__all__ = [
    "LabelRange",
    "Loss",
    "LossTerm",
    "check_labels",
    "check_loss_value",
    "find_loss",
    "resolve_loss",
]
