"""Every condition that PopTorch refuses: its type of error, its words, and what to do about it.

Other tests pin whole texts, and what is left behind.
"""

import pytest

from tests.poptorch.conditions import ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_a_condition_has_its_type_its_words_and_what_to_do(row):
    with pytest.raises(Exception) as failure:  # noqa: PT011  (its type is what is asked)
        row.act()
    assert type(failure.value) is row.kind
    text = str(getattr(failure.value, "message", "") or failure.value.args[0])
    assert row.said in text
    assert row.advice in text


def test_every_condition_is_there_once():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) >= 150
