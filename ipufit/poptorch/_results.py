"""What is special about the tensors that a model returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ipufit.poptorch._errors import error

__all__ = ["without_backward"]


def without_backward(result: Any) -> Any:
    """Outputs that say why there is nothing to go back through."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're "
            "using a trainingModel, the backwards pass is performed automatically when invoking "
            "the model. If you're using an inferenceModel, you should use a trainingModel instead."
        )

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for each in value:
                visit(each)
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, Tensor):
            value.backward = refuse  # type: ignore[method-assign]

    visit(result)
    return result
