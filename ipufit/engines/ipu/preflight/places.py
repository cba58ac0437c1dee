"""Files of PopTorch's repository that the facts name often."""

from __future__ import annotations

from ipufit.engines.ipu.preflight.facts import Place

__all__ = ["canonical", "dispatcher", "guide", "operators_page"]


def guide(page: str, line: int) -> Place:
    """A line of a page of the user guide."""
    return Place(f"docs/user_guide/{page}.rst", line)


def operators_page(line: int) -> Place:
    """A line of the guide's list of operators and layers."""
    return guide("supported_ops", line)


def canonical(name: str, line: int) -> Place:
    """A line of the handlers that turn ATen operators into PopART's."""
    return Place(f"poptorch/source/popart_canonicalization/{name}.cpp", line)


def dispatcher(name: str, line: int) -> Place:
    """A line of the code that takes operators from torch."""
    return Place(f"poptorch/source/dispatch_tracer/{name}", line)
