"""docs/gallery.md shows every example as it is."""

import re

import pytest

from tests.gallery import page

NAMES = [script.stem for script in page.scripts()]
OUTPUT = "# A\n\n```text\n{}\n```\n"


def test_every_example_is_in_the_gallery_in_the_order_of_the_table():
    """An example that is added, renamed or taken away changes the page."""
    assert [*page.parts()] == NAMES == [*page.rows()]
    assert set(NAMES) == {path.stem for path in page.EXAMPLES.glob("*.py")}
    assert page.GALLERY.read_text(encoding="utf-8").startswith(page.HEAD)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_has_the_words_of_the_script_and_a_small_picture(name):
    """Title and sentence stand in the script and in the table; the page repeats them."""
    script, part = page.EXAMPLES / f"{name}.py", page.parts()[name]
    output = page.output(part)
    (seen,) = re.findall(rf"^!\[(.+)\]\(gallery/{name}\.png\)$", part, re.MULTILINE)
    (time,) = re.findall(r"^(A few seconds|About \d+ seconds): ", part, re.MULTILINE)
    assert part.startswith(f"## {page.title(script)}\n\n{page.sentence(script)}\n\n")
    assert seen[0].isupper()
    assert time
    whole = [line for line in output if not line.startswith(page.INDENT)]
    assert 0 < len(whole) <= page.SHOWN + (output[0] == "...")
    assert max(map(len, output)) <= page.WIDTH
    assert (page.PICTURES / f"{name}.png").stat().st_size < 60_000


def test_there_is_no_picture_of_an_example_that_is_gone():
    """Nobody would see it."""
    assert {path.stem for path in page.PICTURES.iterdir()} == set(NAMES)


@pytest.mark.parametrize(
    ("output", "agrees"),
    [
        ("epoch 3/9: loss=0.2\naccuracy 0.97", True),
        ("epoch 4/9: loss=0.3\naccuracy 0.96", True),
        ("epoch 4/9: loss=0.3", False),
        ("other\naccuracy 0.97", False),
        ("epoch 4/9: loss=0.3\nloss 0.96", False),
        ("epoch 4/9: loss=0.3\naccuracy 0.96\nended", False),
    ],
)
def test_outputs_agree_by_the_beginnings_of_lines(output, agrees):
    """Numbers are those of a machine; an end that is another, or most lines, are another output."""
    assert (
        page.agree(OUTPUT.format("epoch 3/9: loss=0.2\naccuracy 0.97"), OUTPUT.format(output))
        == agrees
    )


def test_an_example_that_is_not_on_the_page_does_not_agree():
    """It has no part there."""
    assert not page.agree("", OUTPUT.format("accuracy 0.97"))


def test_of_a_long_output_the_end_is_shown_without_folders_of_a_moment():
    """Who runs the script has others."""
    lines = [f"line {number}" for number in range(20)]
    assert page.ending("\n".join(lines)) == ["...", *lines[-page.SHOWN :]]
    assert page.ending("page: /var/tmp/tmpab12cd_x/run/report.html\n") == ["page: run/report.html"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1.2, "A few seconds"), (7.6, "About 10 seconds"), (23, "About 25 seconds")],
)
def test_times_are_rounded(seconds, said):
    """Another machine needs other times anyway."""
    assert page.rounded(seconds) == said
