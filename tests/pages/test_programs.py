"""The page of published programs is made of their lists."""

from tests.programs.__main__ import PAGE, load_groups, page


def test_the_page_shows_the_lists():
    """`python -m tests.programs --write` writes it."""
    assert PAGE.read_text("utf-8") == page(load_groups())
