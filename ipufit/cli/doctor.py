"""``ipufit doctor``: what of this machine a model can run on, and what is installed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from importlib import metadata
from typing import Any, Dict, List, Optional

from packaging.requirements import Requirement

from ipufit._version import __version__
from ipufit.cli.parsing import CommandParser, add_command

# Names and what is known of them, as they are printed as JSON.
_Values = Dict[str, Any]

_ABOUT = """\
Print what is installed: versions, devices, which engines can run a model and why others can't, and
optional packages. Exit status: 0 if models can be trained here, 1 if a package that ipufit needs is
missing or too old, or IPUFIT_ENGINE names an engine that can't run.
"""
_EXAMPLES = """\
examples:
  ipufit doctor            print text
  ipufit doctor --json     print JSON, for programs or to attach to a question
"""


def add(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the command to the others."""
    what = "print what is installed, and what can run here"
    command = add_command(commands, "doctor", what, _ABOUT, _EXAMPLES)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.set_defaults(do=_do)


def _do(options: argparse.Namespace) -> int:
    facts = _examined()
    if options.json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(facts)) + "\n")
    return 1 if facts["problems"] else 0


def _examined() -> _Values:
    packages = _packages()
    facts: _Values = {
        "versions": {"ipufit": __version__, "Python": platform.python_version()},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "Poplar SDK": os.environ.get("POPLAR_SDK_ENABLED") or "not enabled in this shell",
        },
        "engines": [],
        "packages": packages,
        "problems": _problems(packages),
    }
    try:
        _examine_torch(facts)
    except (ImportError, OSError) as error:
        facts["versions"]["torch"] = "can't be imported"
        facts["problems"].append(
            f"torch must be importable, but its import ends with {type(error).__name__}: {error}. "
            "Install it as https://pytorch.org/get-started says."
        )
    return facts


def _examine_torch(facts: _Values) -> None:
    """Add the version of torch, the devices that it finds, and what can run on them.

    Raises:
        ImportError, OSError: torch, or a library that it needs, can't be imported.
    """
    # Imported here: other commands do without, and this one says what is wrong with it.
    import torch

    from ipufit.engines.choice import list_engines
    from ipufit.utils.devices import name_of

    cuda = "this torch is built without it"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        cuda = f"{torch.version.cuda}: {', '.join(names)}"
    elif torch.version.cuda is not None:
        cuda = f"torch is built for {torch.version.cuda}, and finds no GPU"
    other = "torch finds none"
    # Older versions say nothing.
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        if device is not None and device.type != "cuda":
            other = name_of(device)
    facts["versions"]["torch"] = torch.__version__
    facts["machine"].update(
        {"threads of torch": torch.get_num_threads(), "CUDA": cuda, "other devices": other}
    )
    facts["engines"] = [dataclasses.asdict(each) for each in list_engines()]
    facts["problems"] += _chosen(facts["engines"])


def _packages() -> Optional[List[_Values]]:
    """List the packages that ipufit's metadata names; None in a checkout without metadata."""
    try:
        wanted = metadata.requires("ipufit") or []
    except metadata.PackageNotFoundError:
        return None
    packages = []
    for requirement in map(Requirement, wanted):
        extras = _extras_of(requirement)
        # What another Python or system needs.
        if not extras:
            continue
        extra = extras[0]
        version = _version(requirement.name)
        packages.append(
            {
                "name": requirement.name,
                "extra": extra,
                "wanted": str(requirement.specifier),
                "version": version,
                "fits": version is not None
                and requirement.specifier.contains(version, prereleases=True),
            }
        )
    return packages


def _extras_of(requirement: Requirement) -> List[Optional[str]]:
    """The extras that ask for a package; first None for what is always needed."""
    names = metadata.metadata("ipufit").get_all("Provides-Extra") or []
    marker = requirement.marker
    return [
        name or None for name in ("", *names) if marker is None or marker.evaluate({"extra": name})
    ]


def _version(name: str) -> Optional[str]:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _problems(packages: Optional[List[_Values]]) -> List[str]:
    """Report problems of required packages, and of optional ones that are installed."""
    problems = []
    for each in packages or ():
        if each["version"] is None and each["extra"] is None:
            problems.append(f"{each['name']}{each['wanted']} is missing. Run: pip install ipufit")
        elif each["version"] is not None and not each["fits"]:
            what = "ipufit" if each["extra"] is None else f"ipufit[{each['extra']}]"
            problems.append(
                f"{each['name']} must be {each['wanted']}, but is {each['version']}. Run: "
                f"pip install --upgrade {what}"
            )
    return problems


def _chosen(engines: List[_Values]) -> List[str]:
    """Report a problem of the engine that the environment chooses."""
    name = os.environ.get("IPUFIT_ENGINE")
    usable = [each["name"] for each in engines if each["available"]]
    if not name or name == "auto" or name in usable:
        return []
    return [
        f"IPUFIT_ENGINE is {name!r}, which can't run here. Set it to one of {', '.join(usable)}, "
        "or unset it."
    ]


def _lines(facts: _Values) -> List[str]:
    lines = [f"{name:18}{value}" for name, value in facts["versions"].items()]
    lines += [f"{name:18}{value}" for name, value in facts["machine"].items()]
    lines += ["", "Engines"] if facts["engines"] else []
    for each in facts["engines"]:
        can = "can run" if each["available"] else "can't run"
        lines.append(f"  {each['name']:16}{can}: {each['reason']}")
    lines += ["", "Packages"]
    if facts["packages"] is None:
        lines.append("  ipufit runs from a checkout, which names none. Run: pip install -e .")
    for each in facts["packages"] or ():
        extra = f"  [{each['extra']}]" if each["extra"] else ""
        what = each["version"] or "not installed"
        lines.append(f"  {each['name']:16}{what} (wanted: {each['wanted'] or 'any'}){extra}")
    lines += ["", *(facts["problems"] or ["Models can be trained here."])]
    return lines
