"""The profile of a program that PopVision's Graph Analyser opens."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, Dict, List, Optional

from ipufit.core.compile_arguments import TRAINING
from ipufit.engines.ipu.sdk import is_standin
from ipufit.engines.ipu.size import Size
from ipufit.engines.program import ProgramSpec
from ipufit.utils.console import warn_user

__all__ = ["place_of_profile", "set_profile"]

_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_PREFIX = "autoReport."
_DIRECTORY = "autoReport.directory"


def set_profile(options: Any, spec: ProgramSpec, size: Size) -> None:
    """Have the profile of a program written, where that is asked for.

    What the user's own options or environment say of a profile holds as a whole.

    Args:
        options: of the program; changed.
        spec: what is built.
        size: of one call. The programs of smaller updates have folders of their own.
    """
    if spec.profile_folder is not None and not _own(options):
        options.enableProfiling(os.path.join(_folder(spec), *_beside(spec, size)))


def place_of_profile(sdk: Any, options: Any, spec: ProgramSpec) -> Optional[str]:
    """The folder that the profile is written to; None where none is.

    Args:
        sdk: PopTorch, of which the stand-in writes none.
        options: the user's own, or None.
        spec: what is built.

    Warns:
        UserWarning: it is another one than was asked for.
    """
    if spec.profile_folder is None:
        return None
    own, asked = _own(options), _folder(spec)
    if not own:
        return None if is_standin(sdk) else asked
    who = _VARIABLE if _own(None) else TRAINING
    writes = any(value == "true" for name, value in own.items() if name != _DIRECTORY)
    place = os.path.abspath(own.get(_DIRECTORY, "."))
    if place != asked or not writes:
        what = f"is written to {place!r}" if writes else "is not written"
        warn_user(
            f"report would have PopVision's profile written to {asked!r}, but {who} sets "
            f"{', '.join(sorted(own))}, which holds: the profile {what}.",
        )
    return place if writes and not is_standin(sdk) else None


def _folder(spec: ProgramSpec) -> str:
    """The folder of this process: all run the same program, and each writes what it sees."""
    assert spec.profile_folder is not None
    process = spec.processes.process_id
    return os.path.join(spec.profile_folder, *([f"process-{process}"] if process else []))


def _beside(spec: ProgramSpec, size: Size) -> List[str]:
    """The folder within that one of a program that is not the main one."""
    main, schedule = Size.of(spec.plan), spec.config.schedule
    if schedule is not None and schedule.per_update:
        main = dataclasses.replace(main, iterations=1)
    if size == main:
        return []
    numbers = (size.iterations, size.accumulation, size.replicas, size.micro_batch)
    return ["x".join(map(str, numbers)) + ("" if size.padding == "none" else "-padded")]


def _own(options: Any) -> Dict[str, str]:
    """The user's settings of a profile: the environment comes first, as for Poplar itself."""
    popart = getattr(options, "_Popart", None)
    engine = getattr(popart, "options", {}).get("engineOptions", {})
    found = {**engine, **_environment()}
    return {name: str(value) for name, value in found.items() if name.startswith(_PREFIX)}


def _environment() -> Dict[str, Any]:
    try:
        found = json.loads(os.environ.get(_VARIABLE) or "{}")
    except ValueError:
        # Poplar says so itself.
        return {}
    return found if isinstance(found, dict) else {}
