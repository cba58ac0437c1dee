"""Modules that no program can be recorded of, told at once, and parameters that torch overlooks."""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterator, Tuple

import torch
from torch import Tensor, nn

from ipufit.errors import ConfigurationError, OptimizerError

__all__ = ["Unregistered", "refuse_unrecordable", "refuse_unregistered", "unregistered"]

# Containers of Python, and what torch has in their place: for layers, and for parameters.
_CONTAINERS = (
    ((list, tuple, set, frozenset), "nn.ModuleList", "nn.ParameterList"),
    ((dict,), "nn.ModuleDict", "nn.ParameterDict"),
)


@dataclasses.dataclass(frozen=True)
class Unregistered:
    """An attribute of a module whose tensors torch does not find among its parameters.

    Attributes:
        name: of the attribute, from the user's module on.
        owner: class of the module that has it.
        kind: class of the value.
        content: "layers" or "parameters".
        instead: class of torch's that registers such things.
    """

    name: str
    owner: str
    kind: str
    content: str
    instead: str

    @property
    def text(self) -> str:
        """Say why torch does not find the parameters, as part of a sentence."""
        return (
            f"{self.name!r} of {self.owner} holds {self.content} in a plain {self.kind}, where "
            "torch finds no parameters"
        )

    @property
    def cure(self) -> str:
        """Say how ``__init__`` should assign the attribute instead, as a sentence."""
        attribute = self.name.rpartition(".")[2]
        value = "value" if self.kind == "Tensor" else f"self.{attribute}"
        return f"Write self.{attribute} = {self.instead}({value}) in __init__."


def unregistered(module: nn.Module) -> Dict[int, Unregistered]:
    """Tensors in plain lists, tuples, sets and dicts of a module's parts, by identity.

    Args:
        module: the user's.

    Returns:
        For parameters of layers, and for tensors that require gradients, none of which is a
        parameter of the module, the attribute that holds them.
    """
    registered = {id(p) for p in module.parameters()}
    result: Dict[int, Unregistered] = {}
    for prefix, part in module.named_modules():
        for attribute, value in vars(part).items():
            # Recurrent layers of torch's have a list of their own parameters, or what stands for
            # them.
            if attribute in ("_parameters", "_buffers", "_modules", "_flat_weights"):
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            for tensor, content in _tensors_in(value):
                if id(tensor) in registered or id(tensor) in result:
                    continue
                kind, instead = _registering(value, content)
                result[id(tensor)] = Unregistered(name, type(part).__name__, kind, content, instead)
    return result


def refuse_unregistered(module: nn.Module) -> None:
    """Make sure that a module with nothing to train has no layers where torch overlooks them.

    Raises:
        OptimizerError: it has some.
    """
    for attribute in unregistered(module).values():
        raise OptimizerError(
            f"the module has no trainable parameter: {attribute.text}. {attribute.cure}"
        )


def _tensors_in(value: object) -> Iterator[Tuple[Tensor, str]]:
    """Tensors of a plain container that could be trained, and what of it they are."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, nn.Module):
                yield from ((parameter, "layers") for parameter in each.parameters())
            else:
                yield from _tensors_in(each)
    elif isinstance(value, Tensor) and value.is_leaf and value.requires_grad:
        yield value, "parameters"


def _registering(value: object, content: str) -> Tuple[str, str]:
    """A word for a container, and what torch has in its place."""
    for kinds, for_layers, for_parameters in _CONTAINERS:
        if isinstance(value, kinds):
            return type(value).__name__, for_layers if content == "layers" else for_parameters
    return "Tensor", "nn.Parameter"


def refuse_unrecordable(module: nn.Module) -> None:
    """Look through the module and all its parts.

    Raises:
        ConfigurationError: a part is compiled already, or a parameter has no shape or no data yet.
    """
    for name, part in module.named_modules():
        where = f"its part {name!r}" if name else "it"
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"the module must be plain Python to be recorded, but {where} is a TorchScript "
                f"module ({type(part).__name__}). Pass the module that it was scripted from."
            )
        if type(part).__name__ == "OptimizedModule":
            raise ConfigurationError(
                f"the module must be plain Python to be recorded, but {where} went through "
                "torch.compile. Pass the module itself: ipufit records the whole training step."
            )
        for parameter_name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ConfigurationError(
                    f"every parameter must have a shape, but {parameter_name!r} of "
                    f"{type(part).__name__} gets its own at the first forward. Call the module "
                    "once on an example before ipufit.Model(module)."
                )
            if parameter.is_meta:
                raise ConfigurationError(
                    f"every parameter must have data, but {parameter_name!r} of "
                    f"{type(part).__name__} is on the device meta. Use "
                    "module.to_empty(device=...) and load weights first."
                )
