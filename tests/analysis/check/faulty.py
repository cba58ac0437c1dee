"""Modules with a fault each; ``# finds: kind`` stands at every line that a check must report."""

import itertools
import logging
import random
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MODELS = {}
COUNT = 0
SEEN = []
WEIGHT = nn.Parameter(torch.ones(4))
LOGGER = logging.getLogger("tests.analysis.check")


def faulty(module):
    """A class of modules that are checked with four rows of four."""
    MODELS[module.__name__] = module
    return module


class Base(nn.Module):
    """A dense layer, on inputs that are changed before."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.before(x))


@faulty
class CountsCalls(Base):
    calls = 0

    def before(self, x):
        self.calls += 1  # finds: attribute
        return x / self.calls  # finds: constant


@faulty
class CountsInAGlobal(Base):
    def before(self, x):
        global COUNT
        COUNT += 1  # finds: global
        return x * (1 + COUNT)  # finds: constant


@faulty
class CountsInItsClass(Base):
    total = 0

    def before(self, x):
        type(self).total += 1  # finds: attribute
        return x + self.total  # finds: constant


@faulty
class CountsInAnObject(Base):
    def __init__(self):
        super().__init__()
        self.state = Counter()

    def before(self, x):
        self.state.value += 1  # finds: attribute
        return x


class Counter:
    value = 0


@faulty
class CountsInAClosure(Base):
    def __init__(self):
        super().__init__()
        count = 0

        def shift(x):
            nonlocal count
            count += 1  # finds: global
            return x + count  # finds: constant

        self.shift = shift

    def before(self, x):
        return self.shift(x)


@faulty
class WarmsUp(Base):
    calls = 0

    def before(self, x):
        self.calls += 1  # finds: attribute
        if self.calls > 2:
            x = x * 2  # finds: program
        return x


@faulty
class StartsFromData(Base):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.ready = False

    def before(self, x):
        if not self.ready:
            self.scale.data.copy_(1 / x.std(0))  # finds: program
            self.ready = True  # finds: attribute
        return x * self.scale


@faulty
class ReadsTheClock(Base):
    def before(self, x):
        return x + time.perf_counter()  # finds: constant


@faulty
class ReadsAnIterator(Base):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()

    def before(self, x):
        return x * next(self.numbers)  # finds: constant


@faulty
class DrawsFromRandom(Base):
    def before(self, x):
        shift = random.random()  # finds: random
        return x + shift


@faulty
class DrawsFromNumpy(Base):
    def before(self, x):
        return x * np.random.uniform(1, 2)  # finds: random


@faulty
class DrawsAMaskFromNumpy(Base):
    def before(self, x):
        mask = np.random.rand(4) > 0.5  # finds: random
        return x * torch.from_numpy(mask).float()


@faulty
class DropsLayersByRandom(Base):
    def before(self, x):
        if self.training and random.random() < 2:  # finds: random
            return x
        return F.relu(x)


@faulty
class HasARandomOfItsOwn(Base):
    def __init__(self):
        super().__init__()
        self.random = random.Random(0)

    def before(self, x):
        return x * self.random.gauss(0, 1)  # finds: random


@faulty
class HasAGeneratorOfNumpys(Base):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def before(self, x):
        return x + float(self.generator.random())  # finds: random


@faulty
class HasAGeneratorOfTorchs(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def before(self, x):
        return x + torch.rand(4, generator=self.generator)  # finds: generator


@faulty
class HasAnObjectWithAGenerator(Base):
    class Shift:
        def __init__(self, seed):
            self.generators = [np.random.default_rng(seed)]

        def draw(self):
            return float(self.generators[0].random())  # finds: random

    def __init__(self):
        super().__init__()
        self.shift = self.Shift(0)

    def before(self, x):
        return x + self.shift.draw()


@faulty
class SetsANewGlobal(Base):
    def before(self, x):
        global NEW
        NEW = x * 2  # finds: global
        return x


@faulty
class SeedsTorch(Base):
    def before(self, x):
        torch.manual_seed(3)  # finds: random
        return F.dropout(x)


@faulty
class Branches(Base):
    def before(self, x):
        if x.mean() > 0:  # finds: branch
            x = -x
        return x


@faulty
class Asserts(Base):
    def before(self, x):
        assert torch.isfinite(x).all()  # finds: branch
        return x


@faulty
class TakesAnItem(Base):
    def before(self, x):
        return x / x.abs().max().item()  # finds: number


@faulty
class TakesAFloatAndAnInt(Base):
    def before(self, x):
        scale = float(x.norm())  # finds: number
        shift = int(x.sum())  # finds: number
        return x * scale + shift


@faulty
class TakesAList(Base):
    def before(self, x):
        scale = sum(x[0].tolist())  # finds: number
        return x * scale


@faulty
class ConvertsToNumpy(Base):
    def before(self, x):
        return x + float(np.median(x.detach().numpy()))  # finds: numpy


@faulty
class WritesAText(Base):
    def before(self, x):
        self.head.extra = f"mean {x.mean():.3f}"  # finds: text
        return x


@faulty
class SelectsByAMask(Base):
    def before(self, x):
        return x + x[x > 0].sum()  # finds: shape


@faulty
class FindsNonzeros(Base):
    def before(self, x):
        rows = x.sum(1).nonzero()  # finds: shape
        return x + rows.sum()


@faulty
class SlicesByAValue(Base):
    def before(self, x):
        end = x.abs().sum().long()
        return x + x[:, :end].sum()  # finds: value


@faulty
class HasSeveralFaults(Base):
    def before(self, x):
        if x.sum() > 0:  # finds: branch
            x = x + 1
        x = x * x.max().item()  # finds: number
        return x + x[x > 0].mean()  # finds: shape


@faulty
class BranchesInEvalMode(Base):
    def before(self, x):
        if not self.training and x.sum() > 0:  # finds: branch
            return -x
        return x


@faulty
class Prints(Base):
    def before(self, x):
        print("inputs", x.shape)  # finds: output
        return x


@faulty
class PrintsValues(Base):
    def before(self, x):
        print(x, file=sys.stderr)  # finds: output
        return x


@faulty
class Logs(Base):
    def before(self, x):
        LOGGER.warning("forward")  # finds: output
        return x


@faulty
class Warns(Base):
    def before(self, x):
        warnings.warn("careful", stacklevel=2)  # finds: output
        return x


@faulty
class RebindsABuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def before(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean(0).detach()  # finds: rebound
        return x - self.average


@faulty
class KeepsHiddenState(Base):
    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(4)

    def before(self, x):
        x = x + self.hidden  # finds: folded
        self.hidden = x.mean(0).detach()  # finds: attribute
        return x


@faulty
class ChangesAPlainTensor(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4)

    def before(self, x):
        x = x * self.scale  # finds: folded
        self.scale.mul_(0.9)  # finds: folded
        return x


@faulty
class MakesATensorOfNumbers(Base):
    def __init__(self):
        super().__init__()
        self.scales = [1.0, 1.0, 1.0, 1.0]

    def before(self, x):
        self.scales[0] += 1  # finds: container
        return x * torch.tensor(self.scales)  # finds: folded


@faulty
class KeepsItsFeatures(Base):
    def before(self, x):
        self.features = x * 2  # finds: attribute
        return self.features


@faulty
class CollectsInAList(Base):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def before(self, x):
        self.shapes.append(tuple(x.shape))  # finds: container
        return x


@faulty
class CollectsInAGlobal(Base):
    def before(self, x):
        SEEN.append(len(x))  # finds: container
        return x


@faulty
class CollectsInADict(Base):
    def __init__(self):
        super().__init__()
        self.log = {}

    def before(self, x):
        self.log[len(self.log)] = 1  # finds: container
        return x


@faulty
class HasAnUnusedLayer(Base):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 4)  # finds: unused

    def before(self, x):
        return x


@faulty
class DetachesALayer(Base):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())  # finds: unused

    def before(self, x):
        return self.body(x).detach()


@faulty
class HasANormInEvalMode(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)  # finds: mode
        self.norm.eval()

    def before(self, x):
        return self.norm(x)


@faulty
class HasADropoutInEvalMode(Base):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout())  # finds: mode
        self.body.eval()

    def before(self, x):
        return self.body(x)


@faulty
class SwitchesItsMode(Base):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout()

    def before(self, x):
        self.drop.train(not self.drop.training)  # finds: mode
        return self.drop(x)  # finds: program


@faulty
class ReachesAParameterByAList(Base):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.own = SimpleNamespace(all=[self.scale])

    def before(self, x):
        return x * self.own.all[0]  # finds: outside


@faulty
class HasAParameterThatIsNotRegistered(Base):
    def __init__(self):
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(4))]

    def before(self, x):
        return x * self.weights[0]  # finds: outside


@faulty
class UsesAGlobalParameter(Base):
    def before(self, x):
        return x * WEIGHT  # finds: outside


@faulty
class LooksWhetherThereAreValues(Base):
    def before(self, x):
        if type(x) is torch.Tensor and x.sum() > 0:
            x = x + 1
        return x * x.max().item()  # finds: number


@faulty
class DropsALayerByRandom(Base):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def before(self, x):
        if self.training and random.random() < 2:  # finds: random
            return x
        return self.body(x)
