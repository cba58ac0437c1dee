"""Which layers' values are computed again in the backward pass, and where they run."""

from __future__ import annotations

import contextlib
import fnmatch
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from torch import Tensor, nn

from ipufit.core.compile_arguments import OFF
from ipufit.errors import ConfigurationError, UnknownNameError, unfit
from ipufit.partition.partition import is_called
from ipufit.utils import tree
from ipufit.utils.state import watch_modules


def resolve_recompute(module: nn.Module, recompute: object, jit: str) -> Tuple[str, ...]:
    """Names of the layers, in the order of the module.

    Raises:
        UnknownNameError: a name, or a pattern that fits none; with the nearest name.
        ConfigurationError: anything else that can't work.
    """
    if recompute is False or recompute is None:
        return ()
    names = _repeated(module) if recompute is True else _named(module, recompute)
    for name in names:
        outer = [other for other in names if name.startswith(f"{other}.")]
        if outer:
            raise ConfigurationError(
                f"layers to recompute must not contain each other, but {name!r} is inside "
                f"{outer[0]!r}, which is recomputed as a whole. Name only one of them."
            )
    if jit == OFF:
        raise ConfigurationError(
            "recompute changes a recorded program, but run_eagerly=True records none, got both, "
            f"with recompute={recompute!r}. Leave one of them out."
        )
    return tuple(names)


def _repeated(module: nn.Module) -> List[str]:
    """The blocks of every stack, but for those of single operators, which keep nothing."""
    # Imported here: few models are recomputed.
    from ipufit.partition.layers_per_ipu import stacks_of

    layers: List[str] = []
    for stack in stacks_of(module):
        if any(list(module.get_submodule(layer).children()) for layer in stack.layers):
            layers += stack.layers
    if not layers:
        raise ConfigurationError(
            "recompute=True means every repeated layer, the blocks of a ModuleList or Sequential "
            f"of one class, but {type(module).__name__} has none. Name the layers: "
            "recompute=['encoder', 'decoder']."
        )
    return layers


def _named(module: nn.Module, recompute: object) -> List[str]:
    patterns = [recompute] if isinstance(recompute, str) else recompute
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(n, str) for n in patterns):
        advice = "Write for example recompute=['encoder.layers.0', 'encoder.layers.1'] or "
        needed = "True, False, or names of layers"
        raise unfit("Memory.recompute", needed, recompute, f"{advice}'encoder.layers.*'.")
    modules = {name: part for name, part in module.named_modules() if name}
    wanted: Dict[str, None] = {}
    for name in patterns:
        depth = name.count(".")
        # A star stands for one part of a name.
        fitting = [
            key for key in modules if key.count(".") == depth and fnmatch.fnmatchcase(key, name)
        ]
        if not fitting:
            raise UnknownNameError("layer", name, modules)
        for key in fitting:
            if not is_called(modules[key]):
                raise ConfigurationError(
                    f"layers to recompute must be called, but {key!r} is a "
                    f"{type(modules[key]).__name__}, which only contains layers. Write '{key}.*' "
                    "for each of them."
                )
            wanted[key] = None
    return [name for name in modules if name in wanted]


@contextlib.contextmanager
def watch_calls(
    module: nn.Module,
    names: Sequence[str],
    on_begin: Callable[[str], None],
    on_end: Callable[[str, object], object],
) -> Iterator[None]:
    """Tell of each call of these layers in the block.

    Args:
        module: the user's module.
        names: of its layers.
        on_begin: called with the name before its forward.
        on_end: called with the name and the output, after its forward; may return another output.

    Raises:
        ConfigurationError: one of them was never called.
    """
    if not names:
        yield
        return
    layers = {id(module.get_submodule(name)): name for name in names}
    called = set()

    def begin(layer: nn.Module, args: object) -> None:
        if id(layer) in layers:
            called.add(layers[id(layer)])
            on_begin(layers[id(layer)])

    def end(layer: nn.Module, args: object, output: object) -> object:
        return on_end(layers[id(layer)], output) if id(layer) in layers else None

    with watch_modules(begin, end):
        yield
    missed = [name for name in names if name not in called]
    if missed:
        raise ConfigurationError(
            f"layers to recompute must be called in forward, but {missed[0]!r} was not. Name the "
            "layer around it."
        )


@contextlib.contextmanager
def checkpoint_outputs(sdk: Any, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Tell PopTorch to keep the outputs of these layers, between which it recomputes."""

    def checkpoint_output(name: str, output: object) -> object:
        return tree.map_leaves(
            lambda leaf: sdk.recomputationCheckpoint(leaf) if isinstance(leaf, Tensor) else leaf,
            output,
        )

    with watch_calls(module, names, lambda name: None, checkpoint_output):
        yield
