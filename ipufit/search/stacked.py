"""Several models of one net as a single model, whose parameters have a row for each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Iterator
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.func import functional_call, vmap
from torch.nn import functional

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.compile_arguments import AUTO, GRAPH, KERNELS
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.ipu_settings import IpuSettings
from ipufit.losses import Loss, LossFacts, LossTerm
from ipufit.metrics.metric_set import MetricInputs, MetricSet
from ipufit.optim.rules import Group, rules_by_group
from ipufit.optim.state import make_step_counter
from ipufit.partition.partition import NOT_DIVIDED
from ipufit.planner.divided_module import DividedModule
from ipufit.tracing.fingerprint import StepModule, fingerprint
from ipufit.tracing.recording import autograd_nodes
from ipufit.tracing.recurrent import LIBRARY
from ipufit.training.model import Model
from ipufit.training.session import Session
from ipufit.utils import tree
from ipufit.utils.error_collector import is_number
from ipufit.utils.random_streams import GENERATORS, LOCK
from ipufit.utils.state import device_of, eval_mode, replaced, train_mode

T = TypeVar("T")


# Parameters of a net up to which it gains by others beside it. Updates of larger ones are bound by
# arithmetic, and products of single matrices have faster kernels.
_LARGEST = 2**15
# The padding_idx of an embedding that has none, in the graph of autograd: -1 without a sign.
_NO_ROW = 2**64 - 1


class UnstackableError(Exception):
    """A model can't train together with others; the text says why, as the end of a sentence."""


def of_row(values: Mapping[str, T], row: int) -> Dict[str, T]:
    """Pick the values of one model, by the names that they have in its own fit."""
    ending = f"/{row}"
    return {n[: -len(ending)]: value for n, value in values.items() if n.endswith(ending)}


def _of_all(by_row: Sequence[Mapping[str, T]]) -> Dict[str, T]:
    """Name the values of all models."""
    return {f"{name}/{row}": v for row, values in enumerate(by_row) for name, v in values.items()}


def _draw_masks(like: Tensor, rates: List[float]) -> Tensor:
    """Masks of a dropout, shape (models, *shape of ``like``), by each model's own generator."""
    masks = like.new_empty((len(rates), *like.shape))
    for mask, rate, generator in zip(masks, rates, GENERATORS):
        if 0 < rate < 1:
            mask.bernoulli_(1 - rate, generator=generator)
        else:
            # Torch draws nothing for these.
            mask.fill_(1 - rate)
    shares = [1 - rate if rate < 1 else 1 for rate in rates]
    return masks.div_(like.new_tensor(shares).view(-1, *[1] * like.dim()))


def _define_masks() -> bool:
    """Make an operator that draws masks, where this torch can mark it as one that draws."""
    try:
        tags = (torch.Tag.nondeterministic_seeded,)
        LIBRARY.define("dropout_masks(Tensor like, float[] rates) -> Tensor", tags=tags)
    except TypeError:
        return False
    LIBRARY.impl("dropout_masks", _draw_masks, "CPU")
    shape_alone = lambda like, rates: like.new_empty((len(rates), *like.shape))  # noqa: E731
    LIBRARY.impl("dropout_masks", shape_alone, "Meta")
    return True


_CAN_DRAW = _define_masks()


class _RatesByModel:
    """Rates of a dropout that differ: no number, so that nothing can compute with one of them.

    Args:
        by_row: the rate in each model.
    """

    def __init__(self, by_row: List[float]) -> None:
        self.by_row = by_row

    def _refuse(self, *other: object) -> bool:
        raise UnstackableError("forward depends on the rate of a dropout, which differs")

    __bool__ = __eq__ = _refuse


def _turned(rows: Tensor) -> Tensor:
    """Transpose matrices: so come their gradients."""
    return rows.transpose(1, 2) if rows.dim() == 3 else rows


def _models_first(leaf: Tensor) -> Tensor:
    return leaf.transpose(0, 1).contiguous()


def _dropouts(module: nn.Module) -> List[nn.Dropout]:
    return [part for part in module.modules() if isinstance(part, nn.Dropout)]


class StackedNet(nn.Module):
    """Net whose trained parameters are, for each group of an optimizer, one tensor with rows.

    Args:
        modules: of one structure; they stay as they are.
        groups: names of the trained parameters in each group of an optimizer.

    Attributes:
        weights: of each group, shape (models, elements).
        orders_differ: whether training batches have a dimension over the models behind that over
            the samples; other batches have none.
    """

    def __init__(self, modules: Sequence[nn.Module], groups: Sequence[Sequence[str]]) -> None:
        super().__init__()
        # In a list, so that it is no part of this module.
        self._template = [modules[0]]
        self.orders_differ = False
        named = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
        rows = {name: torch.stack([each[name].detach() for each in named]) for name in named[0]}
        self._shapes = [{name: rows[name].shape[1:] for name in group} for group in groups]
        self.weights = nn.ParameterList(
            nn.Parameter(
                torch.cat([_turned(rows[name]).reshape(len(modules), -1) for name in group], 1)
                if group
                else torch.empty(len(modules), 0)
            )
            for group in groups
        )
        trained = {name for group in groups for name in group}
        self._others = [name for name in rows if name not in trained]
        for place, name in enumerate(self._others):
            self.register_buffer(f"other_{place}", rows[name])
        rates = [[part.p for part in parts] for parts in zip(*map(_dropouts, modules))]
        self._rates = [_RatesByModel(p) if len({*p}) > 1 else p[0] for p in rates]
        # What one call of forward hands on.
        self._latest = types.SimpleNamespace(parts={}, level=0)

    def cut(self, group: int, flat: Tensor) -> Dict[str, Tensor]:
        """Cut what has the shape of a group's weights into (models, *shape) for each parameter."""
        shapes = self._shapes[group]
        parts = torch.split(flat, [shape.numel() for shape in shapes.values()], 1)
        return {
            name: _turned(part.reshape(len(flat), *(shape[::-1] if len(shape) == 2 else shape)))
            for (name, shape), part in zip(shapes.items(), parts)
        }

    def rows(self) -> Dict[str, Tensor]:
        """Parameters and buffers by the name in a model, each with a dimension over the models."""
        tensors = {name: getattr(self, f"other_{i}") for i, name in enumerate(self._others)}
        for group, weight in enumerate(self.weights):
            tensors.update(self.cut(group, weight))
        return tensors

    @property
    def dim(self) -> Optional[int]:
        """Dimension over the models in a batch; None where it has none."""
        return 1 if self.training and self.orders_differ else None

    def check_gradients(self, loss: Tensor) -> None:
        """Make sure that a loss depends on all trained parameters.

        Raises:
            UnstackableError: an optimizer would take no gradient for one of zero, or torch computes
                another gradient.
        """
        parts, self._latest.parts = self._latest.parts, {}
        nodes = list(autograd_nodes([loss.grad_fn])) if loss.requires_grad else []
        # torch keeps the gradient of this row zero in the first model alone.
        if any(getattr(node, "_saved_padding_idx", _NO_ROW) != _NO_ROW for node in nodes):
            raise UnstackableError("an embedding has a padding_idx")
        ends = {each for node in nodes for each in node.next_functions}
        for name, part in parts.items() if nodes else ():
            if (part.grad_fn, part.output_nr) not in ends:
                raise UnstackableError(f"the loss does not depend on {name!r}")

    def forward(self, *args: tree.Tree, **kwargs: tree.Tree) -> tree.Tree:
        """Outputs of all models, which are along dimension 1."""
        (template,) = self._template
        dim = None
        if self.dim is not None:
            # Products of matrices are faster on what lies together.
            args, kwargs = tree.map_leaves(_models_first, (args, kwargs))
            dim = 0
        self._latest.parts = rows = self.rows()

        def call(tensors: Dict[str, Tensor], args: tree.Tree, kwargs: tree.Tree) -> tree.Tree:
            self._latest.level = _functorch.maybe_get_level(next(iter(tensors.values())))
            return functional_call(template, tensors, args, kwargs)

        in_place = [
            _in_this_thread("dropout", self._drop),
            _in_this_thread("scaled_dot_product_attention", _attend),
            *((part, "p", rates) for part, rates in zip(_dropouts(template), self._rates)),
        ]
        mode = train_mode if self.training else eval_mode
        with LOCK, mode(template), replaced(*in_place), _no_fallback_warning():
            return vmap(call, (0, dim, dim), 1, randomness="error")(rows, args, kwargs)

    def _drop(
        self, input: Tensor, p: object = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Stand in for torch's dropout: each model draws random numbers of its own."""
        rates = p.by_row if isinstance(p, _RatesByModel) else [p] * len(self.weights[0])
        if not training or not any(rates):
            return input
        if not _CAN_DRAW:
            raise UnstackableError("dropout of several models needs a newer torch")
        strides = input.stride()
        if sorted(strides, reverse=True) != [*strides]:
            raise UnstackableError("masks of a dropout would be in another order in memory")
        like = torch.empty(input.shape, dtype=input.dtype)
        masks = torch.ops.ipufit.dropout_masks.default(like, rates)
        mask = _functorch._add_batch_dim(masks, 0, self._latest.level)
        return input.mul_(mask) if inplace else input * mask


@contextlib.contextmanager
def _no_fallback_warning() -> Iterator[None]:
    """Let torch warn of no operator that it runs for one model after another."""
    _functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _functorch._set_vmap_fallback_warning_enabled(True)  # type: ignore[attr-defined]


def _in_this_thread(name: str, stand_in: Callable[..., Tensor]) -> Tuple[object, str, object]:
    """Say how to replace a function of torch, but not for what other threads do."""
    thread, original = threading.get_ident(), getattr(functional, name)

    def call(*args: object, **kwargs: object) -> Tensor:
        is_here = threading.get_ident() == thread
        result: Tensor = (stand_in if is_here else original)(*args, **kwargs)
        return result

    return functional, name, call


def _attend(*args: object, **kwargs: object) -> Tensor:
    raise UnstackableError("torch's attention can't run for several models at once")


@dataclasses.dataclass(frozen=True, eq=False)
class _StackedLoss(Loss):
    """The sum of the losses of several models, so that each has the gradient of its own.

    Attributes:
        of_one: the loss of a model.
        net: the models.
    """

    of_one: Loss = dataclasses.field(default_factory=lambda: Loss(""))
    net: StackedNet = dataclasses.field(default_factory=lambda: StackedNet([nn.Module()], []))

    @property
    def part_names(self) -> Tuple[str, ...]:
        """Names under which the losses of the models are logged."""
        return tuple(_of_all([{"loss": 0}] * len(self.net.weights[0])))

    def __call__(
        self, prediction: object, target: object, sample_weight: object = None
    ) -> LossTerm:
        """Return the sum for one micro-batch, of the models whose losses are finite."""
        if sample_weight is not None:
            raise UnstackableError("samples have weights")
        of_one = self.of_one
        with _no_fallback_warning():
            losses = vmap(lambda p, t: of_one(p, t).value, (1, self.net.dim))(prediction, target)
        self.net.check_gradients(losses)
        finite = torch.where(losses.isfinite(), losses, torch.zeros_like(losses))
        # They are reported in this type: once is quicker than for each.
        parts = losses.to(torch.float64).unbind()
        return LossTerm(finite.sum(), None, dict(zip(self.part_names, parts)))

    def facts(self, prediction: object, target: object, value: Optional[Tensor]) -> LossFacts:
        """Say which labels the loss takes."""
        return self.of_one.facts(_select(prediction, 1, 0), target, None)

    def of_micro_batches(self, prediction: object, target: object, count: int) -> Optional[Tensor]:
        """Compute micro-batches one by one: None."""
        return None


def _select(values: tree.Tree, dim: Optional[int], row: int) -> tree.Tree:
    return values if dim is None else tree.map_leaves(lambda leaf: leaf.select(dim, row), values)


class _StackedMetrics(MetricSet):
    """The metrics of several models.

    Args:
        sets: of each.
        net: the models.
    """

    def __init__(self, sets: Sequence[MetricSet], net: StackedNet) -> None:
        metrics = [metric for each in sets for metric in each.by_name().values()]
        super().__init__(metrics)
        self._sets = sets
        self._net = net
        self._can_join = all(metric.counts for metric in metrics)

    @property
    def names(self) -> Tuple[str, ...]:
        """Keys of :meth:`compute`."""
        return tuple(_of_all([dict.fromkeys(each.names) for each in self._sets]))

    @property
    def higher_is_better(self) -> Dict[str, bool]:
        """By name, where it is known."""
        return _of_all([each.higher_is_better for each in self._sets])

    def fresh(self) -> MetricSet:
        """Clone the set without any state."""
        return _StackedMetrics([each.fresh() for each in self._sets], self._net)

    def update_all(self, batches: Sequence[MetricInputs]) -> None:
        """Add the micro-batches of an execution."""
        if self._can_join and all(isinstance(p, Tensor) for p, *_ in batches):
            # The same bits, with one call for each model.
            predictions, targets, sizes, *_ = zip(*batches)
            batches = [(torch.cat(predictions), torch.cat(targets), sum(sizes), None, {})]
        for row, each in enumerate(self._sets):
            each.update_all([self._inputs(row, batch) for batch in batches])

    def _inputs(self, row: int, batch: MetricInputs) -> MetricInputs:
        prediction, target, *rest = batch
        return (_select(prediction, 1, row), _select(target, self._net.dim, row), *rest)

    def compute(self) -> Dict[str, float]:
        """Return the values over everything since the last reset."""
        return _of_all([each.compute() for each in self._sets])

    def probe(self, *inputs: tree.Tree) -> None:
        """Find out, before any training, whether the metrics can take such tensors."""
        for row, each in enumerate(self._sets):
            each.probe(*self._inputs(row, inputs))


class _StackedOptimizer(torch.optim.Optimizer):
    """Groups of several optimizers of one class, each over the parameters of all models.

    Args:
        groups: with "kind", the class, and "models", settings of each model where they differ.
        lr: default.
    """

    def __init__(self, groups: Iterable[Dict[str, tree.Tree]], lr: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr})


class _StackedDivision(DividedModule):
    """The division of several models, which is that of each."""

    def count_own_ipus(
        self, read_example: Callable[[Mode], Optional[MicroBatch]], training: bool
    ) -> None:
        """Count the IPUs of the module's own blocks, with a sample that is the same for all."""
        with replaced((self.module, "orders_differ", False)):
            super().count_own_ipus(read_example, training)


def _may_differ(setting: object) -> bool:
    """Say whether a setting of an optimizer is a number, or numbers such as Adam's betas."""
    return is_number(setting) or (isinstance(setting, tuple) and all(map(is_number, setting)))


def _stack_groups(
    kind: Type[torch.optim.Optimizer], weight: nn.Parameter, groups: Sequence[Group]
) -> Dict[str, tree.Tree]:
    """Make one group of those of several models; what is on for some of them is on in it."""
    models = tuple({n: v for n, v in group.items() if n != "params"} for group in groups)
    first = models[0]
    most = {n: max(each[n] for each in models) for n, v in first.items() if is_number(v)}
    differ = {"models": models} if any(each != first for each in models) else {}
    return {**first, **most, **differ, "params": [weight], "kind": kind}


def kind_of(model: Model) -> Dict[str, Tuple[object, ...]]:
    """Return what must be equal for models that can train as one, by a name for people.

    Raises:
        UnstackableError: this one can't train together with any other.
    """
    session, module = model._compiled("fit_many"), model.module
    config, loss, optimizer = session.config, session.loss, session.optimizer
    on_cpu = session.engine.name == "embedded" and device_of(module).type == "cpu"
    if not on_cpu or session.processes.is_distributed:
        raise UnstackableError("several models train as one on a CPU, in one process")
    divided = session.divided
    is_divided = divided.partitions is not NOT_DIVIDED or divided.auto_round_ipus
    if is_divided or session.fixed != IpuSettings():
        raise UnstackableError("compile divides the model, or has settings of a config or poptorch")
    free = ("gradient_reduction", "accumulation_dtype", "precision", "max_recordings", "jit")
    plain = dataclasses.replace(TrainConfig(), **{name: getattr(config, name) for name in free})
    if config != plain or config.jit not in (AUTO, GRAPH, KERNELS):
        raise UnstackableError(f"compile has options for one model: {config.extras()}")
    if type(loss) is not Loss or loss.in_module or loss.normalize == "tokens":
        raise UnstackableError("only a single loss that is a mean over samples can be stacked")
    if session.metrics.takes_fields:
        raise UnstackableError("its metrics take fields of a batch")
    rules = [] if optimizer is None else rules_by_group(optimizer)
    if optimizer is None or any(rule is None or rule.by_parameter for rule in rules):
        raise UnstackableError("its optimizer has no rule that updates several models at once")
    if session.updates or optimizer.state:
        raise UnstackableError("it was trained before")
    elements = sum(parameter.numel() for parameter in module.parameters())
    if elements > _LARGEST:
        raise UnstackableError(f"a net of {elements:,} parameters is faster by itself")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in session.groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise UnstackableError("its optimizer trains parameters of the loss")
        if len({parameter.dtype for parameter in group["params"]}) > 1:
            raise UnstackableError("parameters of its optimizer have several dtypes")
        of_all = [(key, v) for key, v in group.items() if not _may_differ(v) and key != "params"]
        groups.append(([names[id(parameter)] for parameter in group["params"]], of_all))
    with replaced(*((part, "p", 0.0) for part in _dropouts(module))):
        attributes, _ = fingerprint(StepModule(module, loss))
    tensors = (*module.named_parameters(), *module.named_buffers())
    forms = {name: (t.shape, t.dtype, t.requires_grad) for name, t in tensors}
    of_loss = [(t.dtype, t.tolist()) for t in _tensors_of(loss)]
    parts: List[Tuple[str, object]] = [
        # The first attributes are of module and loss together, of which each model has others.
        *((str(part[0]), part) for part in attributes[1:]),
        *((f"net.{name}", form) for name, form in forms.items()),
        ("loss", repr((dataclasses.replace(loss, module=None), of_loss))),
        ("optimizer", repr((type(optimizer), groups))),
        ("options of compile", repr(config)),
        ("metrics", session.metrics.names),
    ]
    kind: Dict[str, Tuple[object, ...]] = {}
    for name, part in parts:
        what = "tensor" if name[4:] in forms else "layer"
        title = f"{what} {name[4:]!r}" if name.startswith("net.") else name
        kind[title] = (*kind.get(title, ()), part)
    return kind


def _tensors_of(loss: Loss) -> List[Tensor]:
    """Parameters and buffers of a loss that is a module."""
    return [] if loss.module is None else [*loss.module.parameters(), *loss.module.buffers()]


class StackedModels:
    """Models of one kind, ready to train as one.

    Args:
        models: compiled, not trained yet.
        orders_differ: whether each has an order of samples.

    Attributes:
        model: stands for all of them.
    """

    def __init__(self, models: Sequence[Model], orders_differ: bool) -> None:
        self._sessions = [model._compiled("fit_many") for model in models]
        first = self._sessions[0]
        names = {id(parameter): name for name, parameter in first.module.named_parameters()}
        self._net = net = StackedNet(
            [model.module for model in models],
            [[names[id(p)] for p in each["params"] if p.requires_grad] for each in first.groups],
        )
        net.orders_differ = orders_differ
        assert first.optimizer is not None
        self._optimizer = _StackedOptimizer(
            _stack_groups(type(first.optimizer), weight, [s.groups[i] for s in self._sessions])
            for i, weight in enumerate(net.weights)
        )
        settings = {
            field.name: getattr(first.loss, field.name) for field in dataclasses.fields(Loss)
        }
        loss = _StackedLoss(**settings, of_one=first.loss, net=net)
        # Compiled updates have no rule of several models.
        jit = KERNELS if first.config.jit == AUTO else first.config.jit
        config = dataclasses.replace(first.config, jit=jit)
        divided = _StackedDivision(net, self._optimizer, loss, config)
        metrics = _StackedMetrics([session.metrics for session in self._sessions], net)
        self.model = Model(net, engine=models[0]._make_engine)
        self.model._retire(Session(divided, metrics, models[0]._make_engine()))

    @torch.no_grad()
    def publish(self, row: int) -> None:
        """Give a model its weights, buffers and state of the optimizer."""
        session, updates = self._sessions[row], self.model._compiled("fit_many").updates
        module, optimizer = session.module, session.optimizer
        assert optimizer is not None
        rows = self._net.rows()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            tensor.copy_(rows[name][row])
        # Buffers of each replica, with which a fit with as many of them goes on.
        engine, of_all = session.engine, self.model._compiled("fit_many").engine
        if isinstance(engine, EngineContext) and isinstance(of_all, EngineContext):
            buffers = {f"net.other_{i}": f"net.{n}" for i, n in enumerate(self._net._others)}
            engine.carried.replicas = of_all.carried.replicas.of_row(row, buffers)
        for tensor, shared in zip(_tensors_of(session.loss), _tensors_of(self._sessions[0].loss)):
            tensor.copy_(shared)
        parameters = dict(module.named_parameters())
        for i, rule in enumerate(rules_by_group(optimizer)):
            assert rule is not None
            # A group that is frozen has none.
            stacked = self._optimizer.state.get(self._net.weights[i], {})
            names = rule(optimizer.param_groups[i]).tensors if stacked else ()
            states = {name: self._net.cut(i, stacked[name]) for name in names}
            for name in self._net.cut(i, self._net.weights[i]):
                state = {
                    key: parts[name][row].contiguous().clone() for key, parts in states.items()
                }
                if rule.counted:
                    step = make_step_counter(type(optimizer), updates, torch.device("cpu"))
                    state["step"] = step  # type: ignore[assignment]
                if state:
                    optimizer.state[parameters[name]] = state
        session.updates = updates
