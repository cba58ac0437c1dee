"""``python -m tests.browser.screenshots``: makes the pictures of docs/report.md anew."""

import base64
import pathlib
import tempfile

from ipufit.report.page import render_page
from tests.browser.conftest import opened_browser, show, wait_for
from tests.report.made import trained

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"
LARGEST = 150_000  # bytes
EPOCHS, SAMPLES = 20, 1280


def take(browser, name, first, last, width, dark):
    """A picture from the top of one element to the bottom of another.

    Args:
        browser: with the page open.
        name: of the file.
        first, last: selectors.
        width: of the window, in pixels.
        dark: whether the reader likes dark pages.
    """
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    height = browser.execute_script("return document.documentElement.scrollHeight")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # The pictures follow the width.
    wait_for(
        browser,
        "return document.documentElement.clientWidth === innerWidth"
        " && Array.from(document.querySelectorAll('.plot'))"
        ".every((plot) => plot.layout && plot.layout.width === plot.clientWidth)",
    )
    top, bottom = browser.execute_script(
        "return [document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY,"
        " document.querySelector(arguments[1]).getBoundingClientRect().bottom + scrollY]",
        first,
        last,
    )
    area = {"x": 0, "y": max(0, top - 8), "width": width, "height": bottom - top + 16, "scale": 1}
    found = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": area})
    path = PICTURES / f"{name}.png"
    path.write_bytes(base64.b64decode(found["data"]))
    length = path.stat().st_size
    print(f"{path.name}: {length:,} bytes")
    assert length < LARGEST, f"{path.name} must have less than {LARGEST:,} bytes"
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def main():
    """Train twice, and look at the runs."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, opened_browser() as browser:
        folder = pathlib.Path(name)
        fast, slow = (
            trained(folder / run, EPOCHS, SAMPLES, lr=lr)
            for run, lr in (("fast", 0.01), ("slow", 0.0015))
        )
        for page, runs in (("one", [fast]), ("two", [fast, slow])):
            (folder / f"{page}.html").write_text(render_page(runs), encoding="utf-8")
        show(browser, (folder / "one.html").as_uri())
        take(browser, "report-curves", "#curves", "#chart-epoch-0", 1000, False)
        take(browser, "report-pipeline", "#pipeline", "#chart-timeline", 1000, True)
        take(browser, "report-phone", "#time", "#chart-phases-epochs", 390, False)
        show(browser, (folder / "two.html").as_uri())
        take(browser, "report-comparison", "#curves", "#chart-loss", 1000, True)


if __name__ == "__main__":
    main()
