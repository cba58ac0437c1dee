"""What stands in the place of the values of metric objects, and never tells anything untrue."""

from __future__ import annotations

from typing import Any, NoReturn, Optional

from ipufit.lightning_module.trainer_proxy import refuse_here
from ipufit.utils import tree

__all__ = ["MetricValue"]


class MetricValue:
    """In the place of what a call of a metric returns: it may be logged, and nothing else.

    The host computes it after the execution, so that a step that is being recorded has none.

    Args:
        shown: the call, in messages.
        call: its index.
        key: of a collection's result; None of a metric's.
    """

    __slots__ = ("call", "key", "shown")

    def __init__(self, shown: str, call: int, key: Optional[str]) -> None:
        self.shown = shown
        self.call = call
        self.key = key

    def __repr__(self) -> str:
        return f"<the value of {self.shown}, which the host computes after the execution>"

    def _itself(self) -> MetricValue:
        return self

    detach = clone = cpu = item = _itself

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_use(self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = tree.flatten([args, kwargs])[0]
        _refuse_use(next(leaf for leaf in leaves if isinstance(leaf, MetricValue)))


def _refuse_use(self: MetricValue, *_: object) -> NoReturn:
    refuse_here(
        f"the value of {self.shown} was used, but metric objects are updated by the host when the "
        "execution is over, so that a recorded step has no value of theirs",
        "Pass it to self.log as it is. What the step computes with must be computed in tensors, "
        "such as (prediction.argmax(1) == target).float().mean().",
    )


for _name in (
    *("int", "index", "float", "bool", "str", "format", "hash", "eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs", "divmod", "round"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "and", "or", "rdivmod"),
    *("getitem", "iter", "len"),
):
    setattr(MetricValue, f"__{_name}__", _refuse_use)
