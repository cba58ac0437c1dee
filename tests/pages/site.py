"""A folder of HTML pages, as a browser without a network would find it."""

import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

# What a browser fetches without being asked; `<a href>` waits for a click.
FETCHED = ("src", "srcset", "data", "poster", "action")
IN_STYLES = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it fetches."""

    def __init__(self, path):
        super().__init__()
        self.path, self.anchors, self.links, self.fetched = path, {""}, [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if not value:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name == "href" and tag == "a":
                self.links.append(value)
            elif name in FETCHED or name == "href":
                self.fetched.append(value)
            elif name == "style":
                self.fetched += in_styles(value)

    def handle_data(self, data):
        if self.lasttag == "style":
            self.fetched += in_styles(data)


def in_styles(text):
    """The addresses that a style sheet fetches."""
    return [one or other for one, other in IN_STYLES.findall(text)]


def is_foreign(address):
    """Whether an address names a host; what a page holds itself, as `data:`, does not."""
    return bool(urlsplit(address).netloc)


class Site:
    """All pages and style sheets under a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
        if not self.pages:
            raise FileNotFoundError(f"{folder} must hold HTML pages, but there are none.")

    def foreign(self):
        """What is fetched from other hosts: fonts, scripts, styles, pictures."""
        for page in self.pages.values():
            for address in filter(is_foreign, page.fetched):
                yield f"{page.path.relative_to(self.folder)} fetches {address}"
        for path in sorted(self.folder.rglob("*.css")):
            for address in filter(is_foreign, in_styles(path.read_text(encoding="utf-8"))):
                yield f"{path.relative_to(self.folder)} fetches {address}"

    def dead(self):
        """Links and fetched files that lead nowhere within the site."""
        for page in self.pages.values():
            for address in [*page.links, *page.fetched]:
                parts = urlsplit(address)
                if parts.scheme or parts.netloc:
                    continue
                target = (page.path.parent / unquote(parts.path)).resolve()
                if not parts.path:
                    target = page.path.resolve()
                known = self.pages[target].anchors if target in self.pages else {""}
                fragment = unquote(parts.fragment)
                if not target.exists() or (target in self.pages and fragment not in known):
                    yield f"{page.path.relative_to(self.folder)}: {address} leads nowhere"

    def absent(self, anchors):
        """Pages of the reference that are not there, and what they say nothing of.

        Args:
            anchors: by the name of each page, what it must have.
        """
        for name, wanted in anchors.items():
            page = self.pages.get((self.folder / "docs" / "reference" / f"{name}.html").resolve())
            if page is None:
                yield f"{name} has no page"
                continue
            for anchor in wanted:
                if anchor not in page.anchors:
                    place = page.path.resolve().relative_to(self.folder.resolve())
                    yield f"{place} says nothing of {anchor}"

    def cryptic(self, names):
        """Pages of the reference whose signatures have a name in place of what it stands for.

        Args:
            names: of types that have no page.
        """
        for page in sorted((self.folder / "docs" / "reference").glob("*.html")):
            text = page.read_text(encoding="utf-8")
            for name in names:
                if f'<span class="pre">{name}</span>' in text:
                    yield f"{page.relative_to(self.folder)} does not say what {name} is"

    def unfound(self, phrases):
        """Phrases whose words the search box of the site finds in no heading together.

        Args:
            phrases: what people type.
        """
        index = (self.folder / "searchindex.js").read_text(encoding="utf-8")
        titles = json.loads(index[index.index("(") + 1 : index.rindex(")")])["alltitles"]
        headings = [set(re.findall(r"\w+", title.lower())) for title in titles]
        for phrase in phrases:
            if not any(heading.issuperset(phrase.split()) for heading in headings):
                yield f"searching for {phrase} finds no heading"

    def external(self):
        """The addresses elsewhere that pages link to, without those of the theme's footer."""
        theme = (
            "https://www.sphinx-doc.org/",
            "https://pradyunsg.me",
            "https://github.com/pradyun",
        )
        found = {link for page in self.pages.values() for link in page.links if is_foreign(link)}
        return sorted(link for link in found if not link.startswith(theme))
