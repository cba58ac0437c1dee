"""docs/coming-from-poptorch.md says of every setter what `compile` would say."""

import re
from pathlib import Path

from ipufit import poptorch
from ipufit.whole_options import report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-poptorch.md"


def rows():
    """Kind and text by the setter of a row."""
    table = PAGE.read_text(encoding="utf-8").partition("## Setters")[2]
    found = re.findall(r"^\| (`.*`) \| (.*?) \| (.*) \|$", table, re.M)
    return {name: (kind, text) for names, kind, text in found for name in names[1:-1].split("`, `")}


def test_the_kind_of_every_setter_is_the_real_one():
    """Who moves by this table would lose an option that it calls exact by mistake."""
    kinds = dict.fromkeys(report._EXACT.values(), "exact")
    kinds.update({setter: "approximated" for setter, _ in report._APPROXIMATED.values()})
    absent = [*report._NO_EFFECT.values(), *report._BY_FIELD.values()]
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
