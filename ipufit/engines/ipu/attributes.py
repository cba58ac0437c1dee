"""What forward sets on the user's modules, which is traced once and then a constant."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from torch import Tensor

from ipufit.errors import ConfigurationError

__all__ = ["Attributes"]


class Attributes:
    """What objects hold: values, lengths of containers, versions of tensors.

    Args:
        parts: modules and what a loss calls; those of torch's own are left aside.
    """

    def __init__(self, parts: Sequence[object]) -> None:
        self._before: List[Tuple[object, Dict[str, Any], Dict[str, int]]] = [
            (part, dict(vars(part)), _counts(part))
            for part in parts
            if type(part).__module__.partition(".")[0] != "torch"
        ]

    def changed(self) -> Tuple[str, ...]:
        """What is another value or of another length now, as "Class.attribute", sorted.

        Raises:
            ConfigurationError: a tensor that is neither parameter nor buffer has changed.
        """
        found = set()
        for part, values, counts in self._before:
            kind, now = type(part).__name__, vars(part)
            for name, value in now.items():
                if isinstance(value, Tensor) and counts.get(name) not in (None, value._version):
                    raise ConfigurationError(
                        f"forward must not change {kind}.{name} on an IPU, where a tensor that is "
                        "no buffer is a constant. Register it as a buffer of float32, or use "
                        "engine='embedded'."
                    )
            names = {name for name in now if values.get(name, self) is not now[name]}
            names.update(name for name, n in _counts(part).items() if counts.get(name, n) != n)
            found |= {f"{kind}.{name}" for name in names}
        return tuple(sorted(found))


def _counts(part: object) -> Dict[str, int]:
    found = {}
    for name, value in vars(part).items():
        if isinstance(value, Tensor):
            found[name] = value._version
        elif type(value) in (list, dict, set) and not name.startswith("_"):
            found[name] = len(value)
    return found
