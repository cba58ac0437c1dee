"""Losses: from what a user passes to ``compile`` to what a program computes.

:class:`Call` is a loss that takes its arguments by name, of outputs and batch. All other forms and
names are in docs/optimizers-losses-metrics.md.
"""

# ``resolve_loss`` brings a name, a callable, a module or several of these into the normal form,
# ``Loss``. ``named`` has the losses by name and checks their arguments, ``rules`` what the elements
# of torch's losses are before they become one number; ``loss``, ``call``, ``multi_output`` and
# ``train_step`` the normal form of one, of one that takes its arguments by name, of one for each
# output, and of steps of the user's own. Users have what is in __all__, rooms above the rest too.

from ipufit.losses.call import Call
from ipufit.losses.loss import Loss as Loss
from ipufit.losses.loss import Turn as Turn
from ipufit.losses.loss import find_loss as find_loss
from ipufit.losses.named import check_labels as check_labels
from ipufit.losses.named import check_loss_value as check_loss_value
from ipufit.losses.named import outside_classes as outside_classes
from ipufit.losses.resolve import resolve_loss as resolve_loss
from ipufit.losses.rules import LabelRange as LabelRange
from ipufit.losses.rules import LossFacts as LossFacts
from ipufit.losses.rules import LossTerm as LossTerm
from ipufit.losses.train_step import TrainStep as TrainStep
from ipufit.losses.train_step import TurnLoss as TurnLoss
from ipufit.losses.train_step import check_moves as check_moves
from ipufit.losses.train_step import include_shared as include_shared

__all__ = ["Call"]
