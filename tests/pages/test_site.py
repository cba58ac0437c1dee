"""What `python -m tests.pages` finds in a built site."""

import json

import pytest

from tests.pages.site import Site

GOOD = '<p id="here"><a href="#here">x</a> <a href="two.html#there">y</a> <img src="a.svg"></p>'


@pytest.fixture
def folder(tmp_path):
    """A site of two pages, a picture and a style sheet without a fault."""
    (tmp_path / "one.html").write_text(GOOD)
    (tmp_path / "two.html").write_text('<p id="there"><a href="https://a.example/">z</a></p>')
    (tmp_path / "a.svg").write_text("<svg/>")
    (tmp_path / "s.css").write_text('a { background: url("data:image/svg+xml,x") }')
    return tmp_path


def test_a_site_in_order_has_no_fault(folder):
    """A link elsewhere is listed and not followed."""
    site = Site(folder)
    assert [*site.foreign(), *site.dead()] == []
    assert site.external() == ["https://a.example/"]


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://b.example/x.js"></script>',
        '<img src="//b.example/x.png">',
        '<link rel="stylesheet" href="https://b.example/x.css">',
        "<style>@import 'https://b.example/x.css';</style>",
        '<p style="background: url(https://b.example/x.png)">',
    ],
)
def test_what_a_page_fetches_elsewhere_is_found(folder, tag):
    """A reader without a network, or who does not want to be counted, reads the pages too."""
    (folder / "one.html").write_text(GOOD + tag)
    (fault,) = Site(folder).foreign()
    assert fault.startswith("one.html fetches ")
    assert "b.example/x" in fault


def test_what_a_style_sheet_fetches_elsewhere_is_found(folder):
    """Fonts come by way of style sheets."""
    (folder / "s.css").write_text("@font-face { src: url(https://b.example/x.woff2) }")
    assert [*Site(folder).foreign()] == ["s.css fetches https://b.example/x.woff2"]


@pytest.mark.parametrize("address", ["three.html", "two.html#here", "#there", "b.svg"])
def test_a_link_that_leads_nowhere_is_found(folder, address):
    """To a page that is not there, or to an anchor that the page has not."""
    (folder / "one.html").write_text(f'{GOOD}<a href="{address}">x</a>')
    assert [*Site(folder).dead()] == [f"one.html: {address} leads nowhere"]


def test_a_public_name_that_is_not_in_the_reference_is_found(folder):
    """Neither a page nor a method on it is lost without a word."""
    reference = folder / "docs" / "reference"
    reference.mkdir(parents=True)
    (reference / "a.One.html").write_text('<p id="a.One"></p><p id="a.One.fit"></p>')
    site = Site(folder)
    assert [*site.absent({"a.One": ["a.One", "a.One.fit"]})] == []
    assert [*site.absent({"a.One": ["a.One.lost"], "a.Two": []})] == [
        "docs/reference/a.One.html says nothing of a.One.lost",
        "a.Two has no page",
    ]


def test_a_signature_that_names_a_type_instead_of_its_words_is_found(folder):
    """Whoever looks an argument up wants the words that it takes."""
    reference = folder / "docs" / "reference"
    reference.mkdir(parents=True)
    signature = '<em><span class="n"><span class="pre">Mode</span></span></em>'
    (reference / "a.One.html").write_text(signature)
    site = Site(folder)
    assert [*site.cryptic(["Modes"])] == []
    assert [*site.cryptic(["Mode"])] == ["docs/reference/a.One.html does not say what Mode is"]


def test_what_the_search_finds_in_no_heading_is_found(folder):
    """Whoever types the usual words into the search box must get to the page about them."""
    titles = {"A learning-rate finder": [[0, "a"]], "Early stopping": [[1, "b"]]}
    index = json.dumps({"alltitles": titles, "docnames": []})
    (folder / "searchindex.js").write_text(f"Search.setIndex({index})")
    site = Site(folder)
    assert [*site.unfound(["early stopping", "learning rate finder"])] == []
    assert [*site.unfound(["resume"])] == ["searching for resume finds no heading"]


def test_a_folder_without_pages_is_no_site(tmp_path):
    """Else nothing would be found in a build that wrote elsewhere."""
    with pytest.raises(FileNotFoundError, match="must hold HTML pages, but there are none"):
        Site(tmp_path)
