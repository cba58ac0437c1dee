"""Which engine runs a model: by name, by the environment, or by what there is."""

from __future__ import annotations

import dataclasses
import os
from typing import Callable, Dict, List, Union

from ipufit.core import EngineName
from ipufit.engines.program import Engine
from ipufit.errors import unfit

_VARIABLE = "IPUFIT_ENGINE"


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """Name of an engine, and whether it can run here.

    Attributes:
        name: as for ``Model(engine=...)``.
        available: whether it can run here.
        reason: why, or why not.
    """

    name: EngineName
    available: bool
    reason: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.name}: {'available' if self.available else 'not available'}, {self.reason}"


def list_engines() -> List[EngineStatus]:
    """Every engine, whether it can run here, and why or why not.

    Where the Poplar SDK is, this imports its PopTorch to find out.

    >>> [status.name for status in list_engines()]
    ['embedded', 'ipu', 'ipu-standin']
    """
    from ipufit.engines.ipu import sdk

    ipu = sdk.why_no_sdk()
    ipu = sdk.why_no_device() if ipu is None else ipu
    return [
        EngineStatus("embedded", True, "in plain PyTorch, on the device of the module"),
        EngineStatus("ipu", ipu is None, ipu or "through the PopTorch of the Poplar SDK"),
        EngineStatus(
            "ipu-standin",
            True,
            "the IPU engine over a PopTorch in plain torch: no IPU is used",
        ),
    ]


# Each imports its engine when one is made, so that `import ipufit` stays quick.
def _embedded() -> Engine:
    from ipufit.engines.embedded.engine import EmbeddedEngine

    return EmbeddedEngine()


def _ipu() -> Engine:
    from ipufit.engines.ipu.engine import IpuEngine
    from ipufit.engines.ipu.sdk import load_sdk

    return IpuEngine(load_sdk())


def _standin() -> Engine:
    from ipufit.engines.ipu.engine import IpuEngine
    from ipufit.engines.ipu.sdk import load_standin

    return IpuEngine(load_standin(), "ipu-standin")


def _best() -> Engine:
    from ipufit.engines.ipu import sdk

    # Without an SDK there is nothing to import, and so it stays quick.
    if sdk.find_sdk() is not None and sdk.why_no_sdk() is None and sdk.why_no_device() is None:
        return _ipu()
    return _embedded()


_MAKERS: Dict[EngineName, Callable[[], Engine]] = {
    "auto": _best,
    "embedded": _embedded,
    "ipu": _ipu,
    "ipu-standin": _standin,
}

_NAMES = f"one of {', '.join(map(repr, _MAKERS))}"


def engine_maker(engine: Union[EngineName, Callable[[], Engine]]) -> Callable[[], Engine]:
    """Return the function that makes the engine for every ``compile``.

    Args:
        engine: a name, or a callable that makes one. "auto" is what the environment variable
            IPUFIT_ENGINE names; without it, "ipu" where the Poplar SDK and an IPU are, else
            "embedded".

    Raises:
        ConfigurationError: there is no such engine, or no SDK for it.
    """
    if callable(engine):
        return engine
    wanted: str = engine
    if engine == "auto" and os.environ.get(_VARIABLE):
        wanted = os.environ[_VARIABLE]
        if wanted not in _MAKERS:
            advice = "Set it to for example embedded, or unset it."
            raise unfit(f"the environment variable {_VARIABLE}", _NAMES, wanted, advice)
    if not isinstance(wanted, str) or wanted not in _MAKERS:
        needed = f"{_NAMES}, or a callable that makes an engine"
        raise unfit("engine", needed, wanted, "Pass for example engine='embedded'.")
    if wanted == "ipu":
        from ipufit.engines.ipu import sdk

        # Found out now, and imported when the engine is built.
        if sdk.find_sdk() is None:
            sdk.load_sdk()
    return _MAKERS[wanted]
