"""The page of published models has the rows of the lists."""

from tests.models.__main__ import PAGE, load_groups, page


def test_the_page_is_that_of_the_lists():
    """`python -m tests.models --write` writes it."""
    assert PAGE.read_text("utf-8") == page(load_groups())


def test_there_are_sixty_models():
    """Each with a reason where it is not recorded."""
    entries = [entry for group in load_groups() for entry in group.MODELS]
    assert len(entries) >= 60
    assert all(bool(entry.why) == (entry.way == "itself") for entry in entries)
