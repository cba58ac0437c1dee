"""What the pages for those who come from elsewhere say of each option, held against the code."""

import inspect
import re
from pathlib import Path

import ipufit
from ipufit import poptorch
from ipufit.engines.ipu import effects

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "coming-from-poptorch.md"


def rows():
    """Kind and text by the setter of a row."""
    table = PAGE.read_text(encoding="utf-8").partition("## Setters")[2]
    found = re.findall(r"^\| (`.*`) \| (.*?) \| (.*) \|$", table, re.M)
    return {name: (kind, text) for names, kind, text in found for name in names[1:-1].split("`, `")}


def test_the_kind_of_every_setter_is_the_real_one():
    """Who moves by this table would lose an option that it calls exact by mistake."""
    kinds = dict.fromkeys(effects._EXACT.values(), "exact")
    kinds.update({setter: "approximated" for setter, _ in effects._APPROXIMATED.values()})
    absent = [*effects._NO_EFFECT.values(), *effects._BY_FIELD.values()]
    for setter, why in absent:
        assert rows()[setter] == ("absent", why)
    for setter, kind in kinds.items():
        assert rows()[setter][0] == kind


def test_every_setter_has_a_row():
    """An option that is not in the table might be anything."""
    options = poptorch.Options()
    groups = {"": options, "Precision.": options.Precision, "Training.": options.Training}
    groups["TensorLocations."] = options.TensorLocations
    # All groups have these; what is left of Options reads or copies.
    shared = {"checkIsFrozen", "createOrSet", "deleteIfExists", "exists", "set", "update"}
    shared |= {"clone", "defaultOutputMode", "from_json", "loadFromFile", "toDict"}
    setters = {
        f"{group}{name}"
        for group, owner in groups.items()
        for name in dir(type(owner))
        if name[0].islower() and callable(getattr(type(owner), name)) and name not in shared
    }
    assert len(setters) > 40
    assert setters <= set(rows())


def options_of_keras():
    """Kind by method and parameter."""
    page = (DOCS / "coming-from-keras.md").read_text(encoding="utf-8")
    table = page.partition("## Options, one by one")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", table, re.M)[2:]
    assert {kind for _, kind in rows} == {"exact", "approximated", "absent"}
    return {
        (method, name): kind
        for names, kind in rows
        for method, name in re.findall(r"`(\w+)\((\w+)\)`", names)
    }


def test_what_is_exactly_as_in_keras_has_its_name():
    """An argument that is called exact is typed as it is there."""
    kinds = options_of_keras()
    assert len(kinds) > 30
    for (method, name), kind in kinds.items():
        taken = inspect.signature(getattr(ipufit.Model, method)).parameters
        assert name in taken or kind != "exact", f"{method}({name})"
