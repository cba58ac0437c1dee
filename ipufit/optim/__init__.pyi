from ipufit.optim import schedules as schedules
from ipufit.optim import state as state
from ipufit.optim.optimizers import LAMB as LAMB
from ipufit.optim.optimizers import Muon as Muon
from ipufit.optim.several import MultiOptimizer as MultiOptimizer
