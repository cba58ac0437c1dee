"""A browser, and pages that it opens from disk."""

import contextlib
import json
import os
import shutil
import tempfile
import time
import types

import pytest

from ipufit.report.page import render_page
from tests.report.made import HOSTILE, long, trained, with_operators

CHROMIUM, CHROMEDRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
# No sandbox: as root there is none. The others keep the browser from asking anybody for anything.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)
# Seconds until a page that is not ready never will be; a busy machine takes ten of them.
PATIENCE = 60


@contextlib.contextmanager
def opened_browser(logs=types.MappingProxyType({"browser": "ALL", "performance": "ALL"})):
    """A Chromium of its own, with nothing remembered.

    Args:
        logs: what it writes down of its pages.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    folder = tempfile.mkdtemp()
    for option in (*OPTIONS, f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", dict(logs))
    service = webdriver.ChromeService(executable_path=CHROMEDRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def browser():
    """One for all tests."""
    missing = [path for path in (CHROMIUM, CHROMEDRIVER) if not os.path.exists(path)]
    if missing:
        pytest.fail(f"{missing[0]} is missing: run nox -s browser, which installs it", False)
    with opened_browser() as driver:
        yield driver


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A real run, one of 10,000 executions, and one whose names would be code."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    real = with_operators(trained(folder))
    advice = {"kind": "advice", "text": "12 % waits.", "cure": "Prefetch.", "place": "", "count": 1}
    real.facts["warnings"] = [{**advice, "category": ""}]
    return types.SimpleNamespace(real=real, long=long(real), hostile=with_operators(real, HOSTILE))


@pytest.fixture(scope="session")
def addresses(runs, tmp_path_factory):
    """Where the pages lie."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "real": [runs.real],
        "long": [runs.long],
        "hostile": [runs.hostile],
        "two": [runs.real, runs.long],
    }
    found = {}
    for name, shown in pages.items():
        path = folder / f"{name}.html"
        path.write_text(render_page(shown), encoding="utf-8")
        found[name] = path.as_uri()
    return found


def wait_for(browser, script, *arguments):
    """Until a script gives something that is true."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = browser.execute_script(script, *arguments)
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"never true: {script}")


def show(browser, address, all_charts=True):
    """Open a page, and wait until its first charts are drawn.

    Args:
        browser: that opens it.
        address: of the page.
        all_charts: whether the others are drawn too, which else are when they come near.
    """
    # What earlier pages have said is theirs.
    for log in browser.log_types:
        browser.get_log(log)
    browser.get(address)
    wait_for(browser, "return performance.getEntriesByName('drawn').length")
    if all_charts:
        browser.execute_script("drawAll()")


def come_to(browser, chart):
    """Scroll to a chart, which is drawn then."""
    browser.execute_script(
        "document.getElementById(arguments[0]).scrollIntoView({block: 'center', "
        "behavior: 'instant'})",
        chart,
    )
    wait_for(browser, "return !isDue(byId(arguments[0]))", chart)


def complaints(browser):
    """What the console has of errors and warnings."""
    return [each["message"] for each in browser.get_log("browser")]


def requests(browser):
    """Addresses that were asked for."""
    messages = [json.loads(each["message"])["message"] for each in browser.get_log("performance")]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
