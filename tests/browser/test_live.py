"""A page that follows a run."""

import dataclasses
import http.server
import threading

import pytest
from selenium.webdriver.common.by import By

from ipufit.report.page import render_page, render_state
from tests.browser.conftest import come_to, complaints, requests, show, wait_for
from tests.report.made import with_operators

_LAST = "return document.querySelector('#chart-loss .plot').data[0].y.length"
# How far a chart is zoomed, and where in the window it is.
_WHERE = (
    "const f = document.getElementById('chart-loss'); return ["
    "f.querySelector('.plot')._fullLayout.xaxis.range.slice(), f.getBoundingClientRect().top]"
)


class Server:
    """Serves a page, and the state of a run as it is set."""

    def __init__(self, run):
        self.page, self.state = render_page([run], live=True), render_state(run)
        self.asked = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                found = {"/": outer.page, "/state": outer.state}.get(self.path)
                outer.asked += self.path == "/state"
                self.send_response(200 if found else 404)
                self.end_headers()
                self.wfile.write((found or "").encode("utf-8"))

            def log_message(self, *args):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def part(run, executions, status="running"):
    """The run when it had made so many executions."""
    rows = {name: values[:executions] for name, values in run.rows.items()}
    return dataclasses.replace(run, facts={**run.facts, "status": status}, rows=rows)


@pytest.fixture
def run(runs):
    """The real one, without warnings and operators as yet."""
    facts = {**runs.real.facts, "warnings": []}
    del facts["operators"]
    return dataclasses.replace(runs.real, facts=facts)


@pytest.fixture
def server(run):
    """Serves its first six executions."""
    found = Server(part(run, 6))
    yield found
    found.close()


def said(browser):
    return browser.find_element(By.ID, "live-shown").text


def test_a_page_follows_a_run_to_its_end(browser, server, run):
    """New values appear; zoom, order, focus and scroll stay; then it asks no more."""
    show(browser, server.address)
    assert said(browser).startswith("running, updated ")
    assert browser.execute_script(_LAST) == 6
    missing = "return document.querySelectorAll('#operators .missing').length"
    assert browser.execute_script(missing) == 1
    browser.execute_script(
        "document.querySelector('#table-stages th:nth-child(2) button').click();"
        "document.querySelector('#chart-loss-in').click();"
        "document.querySelector('#fold-seen').click();"
        "document.querySelector('#details-params').open = true;"
        "document.documentElement.style.scrollBehavior = 'auto'; scrollTo(0, 900);"
        "document.getElementById('chart-loss-in').focus({preventScroll: true})"
    )
    before = browser.execute_script(
        f"window.node = document.getElementById('chart-loss'); {_WHERE}"
    )
    later = with_operators(part(run, 12))
    facts = {
        **later.facts,
        "seconds": 77.0,
        "warnings": [
            {"kind": "advice", "text": "Slow.", "cure": "Hurry.", "place": "", "count": 1}
        ],
    }
    server.state = render_state(dataclasses.replace(later, facts=facts))
    wait_for(browser, f"{_LAST} === 12")
    after = browser.execute_script(_WHERE)
    assert after[0] == before[0]
    assert after[1] == pytest.approx(before[1], abs=2)
    assert browser.switch_to.active_element.get_attribute("id") == "chart-loss-in"
    assert browser.execute_script("return window.node === document.getElementById('chart-loss')")
    assert browser.execute_script("return document.getElementById('details-params').open")
    hidden = (
        "return Array.from(document.querySelectorAll('.tree tr')).filter((r) => r.hidden).length"
    )
    assert browser.execute_script(hidden) == 3
    stages = browser.execute_script(
        "return Array.from(document.getElementById('table-stages').tBodies[0].rows,"
        " (row) => row.cells[1].textContent)"
    )
    assert stages == ["16,448", "1,168", "260", "96"]
    head = browser.find_element(By.CSS_SELECTOR, "#table-stages thead th:nth-child(2)")
    assert head.get_attribute("aria-sort") == "descending"
    assert browser.execute_script("return document.querySelector('main').firstElementChild.id") == (
        "warnings"
    )
    assert "1 min 17 s" in browser.find_element(By.ID, "summary").text
    # What came with the operators is drawn and can be used.
    assert browser.execute_script(missing) == 0
    come_to(browser, "chart-operators")
    drawn = "return document.querySelectorAll('#chart-operators .bars .point').length"
    assert wait_for(browser, drawn) == 13
    assert len(browser.find_elements(By.CSS_SELECTOR, "#choices-operators > label")) == 4
    server.state = render_state(with_operators(dataclasses.replace(run)))
    wait_for(
        browser, "return document.getElementById('live-shown').textContent.startsWith('finished')"
    )
    asked = server.asked
    browser.execute_async_script("setTimeout(arguments[0], 2500)")
    assert server.asked == asked
    spoken = browser.find_element(By.ID, "live-said").get_attribute("textContent")
    assert spoken.startswith("finished, updated ")
    assert browser.find_element(By.ID, "live").get_attribute("aria-live") == "polite"
    # What is far away is brought up to date when its reader comes back to it.
    assert browser.execute_script(_LAST) == 12
    come_to(browser, "chart-loss")
    assert browser.execute_script(_LAST) == len(run.rows["loss"])
    assert [a for a in requests(browser) if not a.startswith(server.address)] == []
    assert [c for c in complaints(browser) if "favicon" not in c] == []


@pytest.mark.long
def test_a_server_that_is_gone_is_told(browser, server):
    """And the page stops asking, until its reader wants it to."""
    show(browser, server.address)
    server.close()
    wait_for(browser, "return !document.getElementById('live-again').hidden")
    assert said(browser).startswith("The server is gone; this is the run as it was at ")
    spoken = browser.find_element(By.ID, "live-said").get_attribute("textContent")
    assert spoken == browser.execute_script(
        "return document.getElementById('live-shown').textContent"
    )


@pytest.mark.long
def test_a_server_that_is_back_is_asked_again(browser, server):
    """When the reader presses the button, which goes away."""
    show(browser, server.address)
    state, server.state = server.state, ""
    wait_for(browser, "return !document.getElementById('live-again').hidden")
    server.state = state
    browser.execute_script("document.getElementById('live-again').click()")
    wait_for(browser, "return document.getElementById('live-again').hidden")
    wait_for(
        browser, "return document.getElementById('live-shown').textContent.startsWith('running')"
    )


@pytest.mark.long
def test_a_run_that_has_just_begun_is_followed(browser, run):
    """Nothing is known yet, then everything."""
    facts = {
        **{name: run.facts[name] for name in ("format", "error", "begun", "title")},
        "status": "running",
        "epochs": [],
    }
    server = Server(dataclasses.replace(part(run, 0), facts=facts))
    try:
        show(browser, server.address)
        assert browser.execute_script("return figures().length") == 0
        server.state = render_state(with_operators(run))
        wait_for(browser, "return figures().length > 10")
        for figure in browser.execute_script("return figures().map((f) => f.id)"):
            come_to(browser, figure)
        assert browser.execute_script("return figures().every((f) => f.querySelector('svg'))")
        assert [c for c in complaints(browser) if "favicon" not in c] == []
    finally:
        server.close()
