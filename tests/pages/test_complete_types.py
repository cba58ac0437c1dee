"""What tests/complete_types.py makes of a report of the type checker."""

from tests.complete_types import incomplete, public_names


def symbol(name, is_known=True, is_ambiguous=False, *messages):
    return {
        "name": name,
        "isTypeKnown": is_known,
        "isTypeAmbiguous": is_ambiguous,
        "diagnostics": [{"message": message} for message in messages],
    }


def test_unknown_and_guessed_types_are_found():
    """Of the names asked for alone, their members included."""
    symbols = [
        symbol("a.One"),
        symbol("a.One.known"),
        symbol("a.One.unknown", False, False, "Type is\n  unknown"),
        symbol("a.One.guessed", True, True),
        symbol("a.OneMore.unknown", False),
    ]
    found = incomplete({"typeCompleteness": {"symbols": symbols}}, ["a.One", "a.lost"])
    assert found == (
        4,
        [
            "a.lost: the type checker has not seen it",
            "a.One.unknown: Type is unknown",
            "a.One.guessed: of one of its members",
        ],
    )


def test_public_names_are_where_they_are_defined():
    """With the classes that a public one is made of."""
    names = set(public_names())
    assert {
        "ipufit.training.model.Model",
        "ipufit.training.inspection.InspectionMixin",
        "ipufit.core.logged_values.log",
    } <= names
