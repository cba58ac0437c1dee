"""Whether the types of all that is public are complete, for the nox session `typing`.

`basedpyright --verifytypes ipufit --ignoreexternal --outputjson` says of every name in every module
whether a type checker knows its type without guessing. It takes each module for public; here those
names count that a user can reach: what `__all__` of the public modules has, with its members and
the bases it is made of.

    python -m tests.complete_types report.json
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

PUBLIC = (
    "ipufit",
    "ipufit.callbacks",
    "ipufit.analysis.check",
    "ipufit.data",
    "ipufit.errors",
    "ipufit.optim",
    "ipufit.partition",
    "ipufit.optim.schedules",
    "ipufit.sklearn",
    "ipufit.testing",
)
# scikit-learn has no types, so those of what is built on it can't be complete.
UNTYPED = ("ipufit.sklearn",)


def public_names():
    """Full names, where they are defined, of public classes with their bases, and of functions."""
    for place in PUBLIC:
        if place in UNTYPED:
            continue
        module = importlib.import_module(place)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value) or not hasattr(value, "__qualname__"):
                continue
            for kind in value.__mro__ if inspect.isclass(value) else [value]:
                if kind.__module__.startswith("ipufit"):
                    yield f"{kind.__module__}.{kind.__qualname__}"


def incomplete(report, names):
    """Of these names and what is in them: how many there are, and what of them is not known.

    Args:
        report: what the type checker wrote, read.
        names: full names.
    """
    names = set(names)
    symbols = [
        symbol
        for symbol in report["typeCompleteness"]["symbols"]
        if any(symbol["name"] == name or symbol["name"].startswith(f"{name}.") for name in names)
    ]
    missing = names - {symbol["name"] for symbol in symbols}
    faults = [f"{name}: the type checker has not seen it" for name in sorted(missing)]
    for symbol in symbols:
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]:
            said = " ".join(text["message"] for text in symbol["diagnostics"])
            faults.append(f"{symbol['name']}: {' '.join(said.split()) or 'of one of its members'}")
    return len(symbols), faults


if __name__ == "__main__":
    count, faults = incomplete(json.loads(Path(sys.argv[1]).read_text("utf-8")), public_names())
    for fault in faults:
        print(fault)
    print(f"{count} public names, {len(faults)} without a complete type")
    sys.exit(bool(faults) or not count)
