"""Muon: momentum whose matrices are made orthogonal, for the hidden layers of a network."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, Literal, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, nn

from ipufit.errors import OptimizerError

_COEFFICIENTS = (3.4445, -4.775, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024), equal to ``torch.optim.Muon``, for versions of torch without it.

    Args:
        params: matrices.
        lr: learning rate.
        weight_decay: decoupled, as in AdamW.
        momentum: of the running mean of gradients.
        nesterov: whether the momentum is Nesterov's.
        ns_coefficients: of the polynomial of the Newton-Schulz iteration.
        eps: added to the norm that an update is divided by.
        ns_steps: of that iteration.
        adjust_lr_fn: how the rate depends on the shape of a matrix: "original" (None), or
            "match_rms_adamw", which works with learning rates of AdamW.

    Raises:
        OptimizerError: a parameter is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: Union[float, Tensor] = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Optional[Literal["original", "match_rms_adamw"]] = None,
    ) -> None:
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise OptimizerError(
                "adjust_lr_fn of Muon must be None, 'original' or 'match_rms_adamw', got "
                f"{adjust_lr_fn!r}."
            )
        defaults: Dict[str, object] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise OptimizerError(
                        "Muon trains matrices, got a parameter of shape "
                        f"{tuple(parameter.shape)}. Pass optimizer='muon', which trains the others "
                        "with AdamW."
                    )

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """Make an update.

        Args:
            closure: computes the loss again, before it.

        Returns:
            What it returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer, momentum = state["momentum_buffer"], group["momentum"]
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = _orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = parameter.shape
        scale = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-(group["lr"] * scale))


def _orthogonal(matrix: Tensor, numbers: Tuple[float, ...], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix near to one, in bfloat16."""
    a, b, c = numbers
    x = matrix.bfloat16()
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def hidden_matrices(
    modules: Iterable[nn.Module], named: Sequence[Tuple[str, nn.Parameter]]
) -> List[int]:
    """Choose what Muon trains, as its author describes: matrices of hidden layers.

    Embeddings are left out, those by name as in Keras, and the output layer, which is the last
    linear layer.

    Args:
        modules: with their parts, in order.
        named: parameters and their names.

    Returns:
        Identities of the parameters.
    """
    left_out = set()
    last: Optional[nn.Linear] = None
    for module in modules:
        for part in module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                left_out.add(id(part.weight))
            last = part if isinstance(part, nn.Linear) else last
    if last is not None:
        left_out.add(id(last.weight))
    left_out.update(id(parameter) for name, parameter in named if "embed" in name.lower())
    return [id(p) for _, p in named if p.dim() == 2 and id(p) not in left_out]
