"""Wrong implementations, each by one change of the stand-in or of the engine below it.

A mutant is what somebody could have written by mistake. The conformance cases are good enough if
they tell every one from the real thing.
"""

import contextlib
import dataclasses
import importlib
from typing import Any, Callable, List

import torch

from ipufit.poptorch import OutputMode


@contextlib.contextmanager
def changed(place, make):
    """Replace one attribute for a while.

    Args:
        place: "module:name" or "module:Class.name".
        make: given the original, makes what stands in its place.
    """
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    had = name in vars(owner)
    raw = vars(owner)[name] if had else None
    made = make(getattr(owner, name))
    setattr(owner, name, property(made) if isinstance(raw, property) else made)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, raw)
        else:
            delattr(owner, name)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake.

    Attributes:
        name: what is wrong.
        place: as ``changed`` takes it.
        make: as ``changed`` takes it.
        killed_by: pattern of the cases that have to see it.
        engine: whose mistake it is.
    """

    name: str
    place: str
    make: Callable[[Any], Any]
    killed_by: str
    engine: str = "standin"

    def applied(self):
        """A context in which the mistake is made."""
        return changed(self.place, self.make)


MUTANTS: List[Mutant] = []

EXECUTION = "ipufit.poptorch._execution:"
RULES = "ipufit.optim.rules:"
DEVICE = "ipufit.poptorch._device:Device."
EXECUTOR = "ipufit.poptorch._executor:PoplarExecutor."


def mutant(name, place, killed_by, engine="standin"):
    """Make a function of the original a mutant."""

    def keep(make):
        MUTANTS.append(Mutant(name, place, make, killed_by, engine))
        return make

    return keep


# Batches and what comes back.


@mutant("a sample of each micro-batch is dropped", EXECUTION + "_parts", "training/*")
def _dropped(original):
    def parts(tensor, count):
        found = original(tensor, count)
        return [torch.cat([part[:-1], part[:1]]) if part.dim() else part for part in found]

    return parts


@mutant(
    "accumulation before iteration in the batch",
    EXECUTION + "CallShape.input_place",
    "training/di=4 ga=2 R=1 *",
)
def _order(original):
    def place(self, d, a, r):
        return (a * self.iterations + d) * self.groups + self.input_group[r]

    return place


@mutant(
    "replicas before accumulation in the batch",
    EXECUTION + "CallShape.input_place",
    "training/di=1 ga=2 R=2 *",
)
def _replicas_first(original):
    return lambda self, d, a, r: (d * self.groups + self.input_group[r]) * self.accumulation + a


@mutant(
    "micro-batches are worked on backwards", EXECUTION + "CallShape.places", "training/*ga=1 R=1 *"
)
def _backwards(original):
    return lambda self: iter(list(original(self))[::-1])


@mutant("EveryN begins one too early", EXECUTION + "CallShape.returned", "training/*EveryN*")
def _every_early(original):
    def returned(self, d, a):
        every = self.output_mode.name == "EveryN"
        return d % self.period == 0 if every else original(self, d, a)

    return returned


@mutant("EveryN ignores its period", EXECUTION + "CallShape.returned", "training/*EveryN*")
def _every(original):
    return lambda self, d, a: self.output_mode.name == "EveryN" or original(self, d, a)


@mutant(
    "Final is the first micro-batch", EXECUTION + "CallShape.returned", "training/di=4 ga=1 R=1 F*"
)
def _first(original):
    def returned(self, d, a):
        final = self.output_mode.name == "Final"
        return (d, a) == (0, 0) if final else original(self, d, a)

    return returned


@mutant(
    "Final is one for each iteration", EXECUTION + "CallShape.returned", "training/di=4 ga=1 R=1 F*"
)
def _each_iteration(original):
    def returned(self, d, a):
        final = self.output_mode.name == "Final"
        return a == self.accumulation - 1 if final else original(self, d, a)

    return returned


def _replicas_in(order):
    """What comes back is that of the replicas in another order."""

    def make(original):
        def joined(self):
            per = self._shape.replicas
            if not self._sums:
                for i, kept in enumerate(self._tensors):
                    groups = [kept[k : k + per] for k in range(0, len(kept), per)]
                    self._tensors[i] = [tensor for group in groups for tensor in order(group)]
            return original(self)

        return joined

    return make


mutant(
    "Final comes from the wrong replica", EXECUTION + "_Results.concatenated", "training/*R=2 Final"
)(_replicas_in(lambda group: [group[-1]] * len(group)))
mutant(
    "Final comes from one replica only", EXECUTION + "_Results.concatenated", "training/*R=2 Final"
)(_replicas_in(lambda group: group[-1:]))
mutant(
    "replicas come back in the wrong order", EXECUTION + "_Results.concatenated", "inference/*R=2 *"
)(_replicas_in(lambda group: group[::-1]))


@mutant("Sum adds up the replicas too", EXECUTION + "_Results.concatenated", "training/*R=2 Sum")
def _sum_replicas(original):
    def joined(self):
        if len(self._sums) > 1:
            self._sums = {0: [sum(each) for each in zip(*self._sums.values())]}
        return original(self)

    return joined


@mutant("Sum is a mean", EXECUTION + "_Results.concatenated", "inference/*R=1 Sum")
def _mean_for_sum(original):
    def joined(self):
        count = self._shape.iterations * self._shape.accumulation
        self._sums = {r: [t / count for t in tensors] for r, tensors in self._sums.items()}
        return original(self)

    return joined


@mutant(
    "groups are always consecutive",
    "ipufit.poptorch._compiled:shape_of",
    "training/input groups Orthogonal",
)
def _consecutive(original):
    def shape_of(options):
        shape = original(options)
        return dataclasses.replace(shape, input_group=tuple(sorted(shape.input_group)))

    return shape_of


@mutant(
    "the default of training is All",
    "ipufit.poptorch._executor:model_options",
    "training/di=4 ga=1 R=1 Default",
)
def _default(original):
    def own(options, training):
        asked = options is None or options.defaultOutputMode()
        found = original(options, training)
        return found.outputMode(OutputMode.All) if asked else found

    return own


# Gradients.


def _settings_of_execution(**settings):
    def make(original):
        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            for name, value in settings.items():
                setattr(self, name, value)

        return init

    return make


mutant(
    "the sum of gradients for their mean",
    EXECUTION + "MicroBatchRunner.__init__",
    "reduction/*Mean*",
)(_settings_of_execution(mean=False))
mutant(
    "the mean of gradients for their sum",
    EXECUTION + "MicroBatchRunner.__init__",
    "reduction/*Sum*",
)(_settings_of_execution(mean=True))


def _divided_by(count):
    """The divisor of the mean is another."""

    def make(original):
        def update(self, total, large):
            shape = self.shape
            if self.mean:
                factor = shape.accumulation * shape.replicas / count(shape)
                total = {key: value * factor for key, value in total.items()}
            return original(self, total, large)

        return update

    return make


mutant(
    "the mean forgets the replicas", EXECUTION + "MicroBatchRunner._update", "reduction/*R=2*Mean*"
)(_divided_by(lambda shape: shape.accumulation))
mutant(
    "the mean forgets accumulation", EXECUTION + "MicroBatchRunner._update", "reduction/*ga=3*Mean*"
)(_divided_by(lambda shape: shape.replicas))
mutant("the mean is over iterations too", EXECUTION + "MicroBatchRunner._update", "training/di=4*")(
    _divided_by(lambda shape: shape.accumulation * shape.replicas * shape.iterations)
)


@mutant(
    "the last micro-batch is the gradient",
    EXECUTION + "MicroBatchRunner._accumulate",
    "reduction/*",
)
def _last(original):
    def accumulate(self, total, replica, gradients):
        total.clear()
        return original(self, total, replica, gradients)

    return accumulate


@mutant("a gradient of one replica only", EXECUTION + "MicroBatchRunner._accumulate", "*R=2*")
def _one_replica(original):
    def accumulate(self, total, replica, gradients):
        factor = self.shape.replicas * (replica == 0)
        scaled = {name: g * factor for name, g in gradients.items()}
        return original(self, total, replica, scaled)

    return accumulate


@mutant(
    "elements of the loss are averaged",
    "ipufit.poptorch._recording:_Step._gradients",
    "loss/identity sum*",
)
def _averaged(original):
    def gradients(self, loss, state, scale):
        return [gradient / 4 for gradient in original(self, loss, state, scale)]

    return gradients


@mutant(
    "identity_loss always averages",
    "ipufit.poptorch:identity_loss",
    "loss/identity sum*",
)
def _identity(original):
    return lambda x, reduction: original(x, "mean")


# Optimizers.


@mutant(
    "the first gradient is not dampened",
    "ipufit.poptorch._optimizer_rules:DeviceSGDRule.coefficients",
    "optimizer/*dampens*",
)
def _dampening(original):
    def coefficients(self, group, step):
        return original(self, {**group, "dampening": group["dampening"] if step > 1 else 0}, step)

    return coefficients


@mutant(
    "no dampening at all",
    "ipufit.poptorch._optimizer_rules:DeviceSGDRule.coefficients",
    "optimizer/*dampens*",
)
def _undampened(original):
    return lambda self, group, step: original(self, {**group, "dampening": 0}, step)


@mutant(
    "dampening needs momentum",
    "ipufit.poptorch._optimizer_rules:DeviceSGDRule.coefficients",
    "optimizer/*dampens*",
)
def _dampening_without_momentum(original):
    def coefficients(self, group, step):
        own = group["dampening"] if group["momentum"] else 0
        return original(self, {**group, "dampening": own}, step)

    return coefficients


@mutant("nesterov is ignored", RULES + "SGDRule.update", "optimizer/*nesterov*")
def _nesterov(original):
    def update(self, *args):
        self.nesterov = False
        return original(self, *args)

    return update


@mutant("momentum starts anew at every call", EXECUTION + "MicroBatchRunner.run", "training/*Final")
def _forgetful(original):
    def run(self, *args):
        updates = self.device.updates
        for member in getattr(updates, "_members", []):
            for tensor in member.state.values():
                tensor.zero_()
        return original(self, *args)

    return run


@mutant("Adam without bias correction", RULES + "_unbiased", "optimizer/*Adam*")
def _biased(original):
    return lambda beta, step: 1.0


@mutant("AdamW decays like Adam", RULES + "AdamWRule.decoupled", "optimizer/*AdamW*")
def _coupled(original):
    return False


@mutant("eps within the root", RULES + "AdamRule.update", "optimizer/*Adam*eps=0.001*")
def _root(original):
    def update(self, p, g, state, c, segments):
        *first, eps, decay = c
        return original(self, p, g, state, [*first, eps.sqrt(), decay], segments)

    return update


@mutant("RMSprop has TensorFlow's form", RULES + "RMSpropRule.tensorflow", "optimizer/*RMSprop*")
def _tensorflow(original):
    return True


@mutant("LAMB has no limit", RULES + "LAMBRule.coefficients", "optimizer/*LAMB*")
def _unlimited(original):
    return lambda self, group, step: [*original(self, group, step)[:-1], 1e9]


@mutant(
    "loss scaling is not undone",
    "ipufit.poptorch._optimizer:CompiledOptimizer._unscaled",
    "optimizer/*loss_scaling*",
)
def _scaled(original):
    return lambda self, part, flat, gradient: gradient


@mutant(
    "gradients are not clipped", "ipufit.poptorch._optimizer:clipped", "optimizer/*max_grad_norm*"
)
def _unclipped(original):
    return lambda gradients, blocks, clip: list(gradients)


@mutant(
    "each gradient is clipped alone",
    "ipufit.poptorch._optimizer:clipped",
    "optimizer/*max_grad_norm*",
)
def _alone(original):
    return lambda gradients, blocks, clip: original(
        gradients, blocks, dataclasses.replace(clip, global_norm=None, norm=clip.global_norm)
    )


@mutant(
    "a new learning rate never arrives",
    EXECUTOR + "setOptimizer",
    "weights/setOptimizer*",
)
def _deaf(original):
    return lambda self, optimizer: None


@mutant("a new learning rate arrives untold", EXECUTOR + "__call__", "weights/setOptimizer*")
def _eager(original):
    def call(self, *args, **kwargs):
        if self.isCompiled() and self._optimizer is not None:
            self.setOptimizer(self._optimizer.optimizer)
        return original(self, *args, **kwargs)

    return call


@mutant(
    "groups share the first rate",
    "ipufit.poptorch._optimizer:CompiledOptimizer._numbers",
    "weights/parameter groups*",
)
def _first_group(original):
    return lambda self, name, group: original(self, name, 0)


# Weights and buffers.


@mutant(
    "stale weights in inference after training",
    "ipufit.poptorch._wrapping:HostWeights.is_behind",
    "weights/inference*",
)
def _stale(original):
    return lambda self: False


@mutant("an evaluation takes training back", EXECUTOR + "__call__", "weights/training goes on*")
def _taken_back(original):
    kept = {}

    def call(self, *args, **kwargs):
        model = self._user_model
        # An inference model has a copy of the module, with the same parameters.
        key = id(next(model.parameters(), None))
        if self._training:
            kept.setdefault(key, {k: v.clone() for k, v in model.state_dict().items()})
        result = original(self, *args, **kwargs)
        if not self._training and key in kept:
            with torch.no_grad():
                for name, value in kept[key].items():
                    model.get_parameter(name).copy_(value)
        return result

    return call


@mutant("trained weights stay on the device", EXECUTOR + "copyWeightsToHostIfNeeded", "weights/*")
def _kept(original):
    return lambda self: False


@mutant("the host's weights go along with every call", EXECUTOR + "__call__", "weights/the host's*")
def _sent(original):
    def call(self, *args, **kwargs):
        if self.isCompiled():
            self.copyWeightsToHostIfNeeded()
            self.copyWeightsToDevice()
        return original(self, *args, **kwargs)

    return call


@mutant(
    "frozen parameters are trained",
    "ipufit.poptorch._wrapping:HostWeights.trainable",
    "weights/what the*",
)
def _thawed(original):
    def trainable(self, groups):
        for parameter in self._model.parameters():
            parameter.requires_grad_(True)
        return original(self, groups)

    return trainable


@mutant("replicas share their buffers", DEVICE + "state", "buffers/every*")
def _shared(original):
    return lambda self, replica: original(self, 0)


def _buffers_of(device):
    return [name for name in device.names if name not in device.parameters]


@mutant("buffers start anew at every call", EXECUTION + "MicroBatchRunner.run", "buffers/an inf*")
def _reset(original):
    first = {}

    def run(self, *args):
        parts = self.device._parts
        buffers = {n: [t.clone() for t in parts[n]] for n in _buffers_of(self.device)}
        for name, tensors in first.setdefault(id(self), buffers).items():
            for tensor, start in zip(parts[name], tensors):
                tensor.copy_(start)
        return original(self, *args)

    return run


@mutant(
    "statistics move once per update",
    EXECUTION + "MicroBatchRunner._micro_batch",
    "training/BatchN*",
)
def _once(original):
    def micro_batch(self, replica, leaves):
        names = _buffers_of(self.device)
        self.turn = getattr(self, "turn", -1) + 1
        kept = [t.clone() for n in names for t in self.device._parts[n]]
        result = original(self, replica, leaves)
        if self.turn % (self.shape.accumulation * self.shape.replicas):
            for tensor, old in zip((t for n in names for t in self.device._parts[n]), kept):
                tensor.copy_(old)
        return result

    return micro_batch


# Values.


@mutant(
    "int64 comes back",
    "ipufit.poptorch._compiled:narrowed_output",
    "values/*int32*",
)
def _wide(original):
    return lambda tensor: tensor.long() if tensor.dtype == torch.int64 else original(tensor)


@mutant(
    "what forward changes of its inputs is lost",
    "ipufit.poptorch._arguments:Arguments.callers",
    "inputs/a change*",
)
def _lost(original):
    return lambda self, like: [tensor.clone() for tensor in original(self, like)]


@mutant(
    "replicas draw the same numbers",
    EXECUTION + "MicroBatchRunner._start_random_numbers",
    "random/drop*",
)
def _alike(original):
    return lambda self, seed, place: original(self, seed, (*place[:2], 0))


@mutant("calls draw the same numbers", EXECUTION + "MicroBatchRunner.run", "random/the same*")
def _again(original):
    first = {}
    return lambda self, inputs, seed: original(self, inputs, first.setdefault(id(self), seed))


@mutant("for_loop runs its body once", "ipufit.poptorch:for_loop", "operators/for_loop*")
def _loop(original):
    return lambda count, body, inputs: original(1, body, inputs)


# Data.


@mutant(
    "processes have the same samples",
    "ipufit.poptorch._dataloader:share_bounds",
    "data/two processes have*",
)
def _same(original):
    return lambda samples, processes, process, *rest: original(samples, processes, 0, *rest)


@mutant(
    "every process shuffles for itself",
    "ipufit.poptorch._dataloader:ProcessShare.__init__",
    "data/two processes that*",
)
def _own_shuffle(original):
    def init(self, dataset, processes, process, *args, **kwargs):
        original(self, dataset, processes, process, *args, **kwargs)
        if self._seed is not None:
            self._seed += process

    return init


# The engine below, by its own face.


@mutant(
    "the engine adds up gradients for their mean",
    "ipufit.engines.gradient_reduction:GradientSum.reduced",
    "reduction/*Mean*",
    engine="embedded",
)
def _engine_sum(original):
    def reduced(self, loss_scale):
        self._share = 1.0
        return original(self, loss_scale)

    return reduced
