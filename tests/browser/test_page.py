"""The page in a real browser."""

import base64

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import complaints, requests, show, wait_for
from tests.report.made import HOSTILE

NAMES = ("real", "long", "hostile", "two")
_WIDTHS = "return figures().map((f) => Number(f.querySelector('svg').getAttribute('width')))"


@pytest.fixture
def page(browser, addresses):
    """The page of the real run."""
    show(browser, addresses["real"])
    return browser


def ranges(browser, chart):
    return browser.execute_script(
        "const p = document.querySelector(`#chart-${arguments[0]} .plot`);"
        "return [p.layout.xaxis.range.slice(), p.layout.xaxis.autorange];",
        chart,
    )


def width(browser, chart):
    (a, b), _ = ranges(browser, chart)
    return abs(b - a)


def column(browser, table, place):
    return browser.execute_script(
        "return Array.from(document.getElementById(arguments[0]).tBodies[0].rows,"
        " (row) => row.cells[arguments[1]].textContent)",
        table,
        place,
    )


def press(browser, selector):
    browser.execute_script(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "e.click()",
        selector,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_page_renders_without_a_complaint(browser, addresses, name):
    """Every chart is drawn, the console is empty, and nothing is asked for but the file itself."""
    show(browser, addresses[name])
    drawn = browser.execute_script(
        "return Array.from(document.querySelectorAll('figure.chart'),"
        " (f) => [f.id, f.querySelectorAll('.plot svg.main-svg').length])"
    )
    assert len(drawn) >= 7
    assert all(count >= 1 for _, count in drawn)
    assert complaints(browser) == []
    assert {address.partition(":")[0] for address in requests(browser)} <= {"file", "data", "blob"}
    files = {a for a in requests(browser) if a.startswith("file:")}
    assert files <= {addresses[name]}


@pytest.mark.long
def test_the_time_until_all_charts_of_10000_executions_are_drawn_is_told(
    browser, addresses, capsys
):
    """Told, not judged: how busy the machine is decides it. Size is judged in tests/report."""
    show(browser, addresses["long"])
    spent = browser.execute_script("return performance.getEntriesByName('drawn')[0].startTime")
    with capsys.disabled():
        print(
            f"\n10,000 executions: all charts drawn {spent / 1000:.2f} s after the page was opened"
        )
    assert browser.execute_script("return figures().length") > 10


@pytest.mark.parametrize("how", ["click", "keyboard"])
def test_tables_sort(page, how):
    """Numbers by value, the largest first; then the other way; screen readers are told."""
    head = page.find_element(By.CSS_SELECTOR, "#table-stages thead th:nth-child(2)")
    button = head.find_element(By.TAG_NAME, "button")

    def act():
        if how == "click":
            press(page, "#table-stages thead th:nth-child(2) button")
        else:
            button.send_keys(Keys.ENTER)

    assert head.get_attribute("aria-sort") == "none"
    act()
    numbers = [int(text.replace(",", "")) for text in column(page, "table-stages", 1)]
    assert numbers == sorted(numbers, reverse=True) == [16448, 1168, 260, 96]
    assert head.get_attribute("aria-sort") == "descending"
    act()
    numbers = [int(text.replace(",", "")) for text in column(page, "table-stages", 1)]
    assert numbers == [96, 260, 1168, 16448]
    assert head.get_attribute("aria-sort") == "ascending"


def test_tables_sort_by_value_not_by_text(page):
    """900 µs is more than 61 µs, whatever the units; sums stay below."""
    press(page, "#table-phases thead th:nth-child(2) button")
    values = page.execute_script(
        "return Array.from(document.getElementById('table-phases').tBodies[0].rows,"
        " (row) => Number(row.cells[1].dataset.value))"
    )
    assert values == sorted(values, reverse=True)
    foot = page.find_element(By.CSS_SELECTOR, "#table-phases tfoot tr")
    assert foot.text.startswith("all ")


def test_curves_zoom_by_buttons(page):
    """In halves the width, out doubles it, reset shows all."""
    whole = width(page, "loss")
    press(page, "#chart-loss-in")
    assert width(page, "loss") == pytest.approx(whole / 2)
    press(page, "#chart-loss-out")
    assert width(page, "loss") == pytest.approx(whole)
    press(page, "#chart-loss-in")
    press(page, "#chart-loss-reset")
    assert width(page, "loss") == pytest.approx(whole)
    assert ranges(page, "loss")[1] is True


def test_curves_zoom_and_pan_by_keys(page):
    """+, - and 0, and the arrows, as soon as a chart has the focus."""
    whole = width(page, "loss")
    figure = page.find_element(By.ID, "chart-loss")
    figure.send_keys("+")
    assert width(page, "loss") == pytest.approx(whole / 2)
    (before, _), _ = ranges(page, "loss")
    figure.send_keys(Keys.ARROW_RIGHT)
    (after, _), _ = ranges(page, "loss")
    assert after - before == pytest.approx(whole / 2 * 0.2)
    figure.send_keys(Keys.ARROW_LEFT)
    assert ranges(page, "loss")[0][0] == pytest.approx(before)
    figure.send_keys("-")
    assert width(page, "loss") == pytest.approx(whole)
    figure.send_keys("0")
    assert ranges(page, "loss")[1] is True


def test_curves_zoom_by_mouse(page):
    """What was dragged over becomes the whole."""
    whole = width(page, "loss")
    page.execute_script(
        "document.getElementById('chart-loss').scrollIntoView({block: 'center', "
        "behavior: 'instant'})"
    )
    drag = page.find_element(By.CSS_SELECTOR, "#chart-loss .nsewdrag")
    length = drag.size["width"]
    moves = ActionChains(page).move_to_element_with_offset(drag, -length // 4, 0).click_and_hold()
    moves.move_by_offset(length // 4, 0).move_by_offset(length // 4, 0).release().perform()
    wait_for(
        page, "return document.querySelector('#chart-loss .plot').layout.xaxis.autorange === false"
    )
    assert width(page, "loss") == pytest.approx(whole / 2, rel=0.05)


@pytest.mark.long
def test_curves_change_their_axes(page):
    """Over time, logarithmic, and smooth: raw values stay visible behind the mean."""
    press(page, "#chart-loss-way")
    title = "return document.querySelector('#chart-loss .plot').layout.xaxis.title.text"
    assert page.execute_script(title) == "seconds since the run began"
    press(page, "#chart-loss-log")
    kind = "return document.querySelector('#chart-loss .plot').layout.yaxis.type"
    assert page.execute_script(kind) == "log"
    slider = page.find_element(By.ID, "chart-loss-span")
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert slider.get_attribute("aria-valuetext") == "about 4 executions"
    assert (
        page.execute_script("return document.querySelector('#chart-loss .plot').data.length") == 2
    )


@pytest.mark.long
def test_the_mean_forgets_without_a_bias(page):
    """Of equal values it is that value from the first; gaps stay gaps."""
    found = page.execute_script("return smoothed([3, 3, null, 3], 4)")
    assert found == [pytest.approx(3), pytest.approx(3), None, pytest.approx(3)]
    first, second = page.execute_script("return smoothed([1, 2], 2)")
    assert (first, second) == (1, pytest.approx((0.5 * 1 + 2) / 1.5))


def test_the_numbers_of_the_timeline_are_those_of_the_plan(page, runs):
    """What is drawn, and what is written beside it."""
    line = runs.real.facts["plan"]["timeline"]
    shown = [
        page.find_element(By.ID, f"plan-{name}").get_attribute("value")
        for name in ("utilisation", "bubble", "total")
    ]
    used = line["utilisation"]
    assert list(map(float, shown)) == [used, 1 - used, line["total"]]
    drawn = page.execute_script(
        "return document.querySelector('#chart-timeline .plot').data.flatMap((trace, back) =>"
        " Array.from(trace.x, (x, i) => [trace.y[i], Number(trace.text[i]), back === 1,"
        " trace.base[i], trace.base[i] + x]))"
    )
    assert len(drawn) == len(line["tasks"])
    for found, task in zip(sorted(drawn), sorted(line["tasks"])):
        assert found == [*task[:3], *(pytest.approx(time, abs=1e-8) for time in task[3:])]
    bars = page.find_elements(By.CSS_SELECTOR, "#chart-timeline .bars .point")
    assert len(bars) == len(line["tasks"])


def test_hostile_names_stay_text(browser, addresses):
    """In tables, in pictures, and in what is shown under the mouse: none becomes an element."""
    show(browser, addresses["hostile"])
    elements = browser.execute_script(
        "return [document.querySelectorAll('img').length,"
        " document.querySelectorAll('script').length,"
        " Array.from(document.querySelectorAll('.plot a')).length]"
    )
    assert elements == [0, 3, 0]
    first = column(browser, "table-operators-each", 0)[0]
    assert first == f"convolution_backward{HOSTILE}"
    labels = browser.execute_script(
        "return Array.from(document.querySelectorAll('#chart-operators .ytick text'),"
        " (t) => t.textContent)"
    )
    assert any("<script>" in label for label in labels)
    bar = browser.find_element(By.CSS_SELECTOR, "#chart-operators .bars .point")
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", bar
    )
    ActionChains(browser).move_to_element(bar).perform()
    text = wait_for(
        browser,
        "return Array.from(document.querySelectorAll('#chart-operators .hovertext'),"
        " (t) => t.textContent).join('')",
    )
    assert "<script>alert('1')</script>" in text
    assert complaints(browser) == []


def test_scripts_of_others_do_not_run(page):
    """Whatever gets into the page by some fault, the policy stops."""
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hurt = 1';"
        "document.body.append(s); const d = document.createElement('div');"
        "d.innerHTML = '<img src=x onerror=\"window.hurt = 1\">'; document.body.append(d)"
    )
    asked = page.execute_async_script(
        "const done = arguments[0];"
        "fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    )
    assert asked == "refused"
    assert page.execute_script("return window.hurt") is None
    assert not [a for a in requests(page) if a.startswith("http")]


def test_light_and_dark(page):
    """As the system has it, until the reader chooses; pictures follow."""
    ink = "return document.querySelector('#chart-loss .plot').layout.font.color"
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = page.execute_script(ink), page.execute_script(paper)
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    try:
        wait_for(page, f"{ink} !== arguments[0]", light[0])
        dark = page.execute_script(ink), page.execute_script(paper)
        assert dark[1] != light[1]
        button = page.find_element(By.ID, "theme")
        assert button.get_attribute("aria-label") == "Change to the light look"
        button.click()
        assert (page.execute_script(ink), page.execute_script(paper)) == light
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_prints(page):
    """All pictures are there in light colours, and afterwards the screen is as it was."""
    before = page.execute_script(_WIDTHS)
    found = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert base64.b64decode(found["data"])[:5] == b"%PDF-"
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    widths = page.execute_script(_WIDTHS)
    assert max(widths) <= 660
    closed = "return document.querySelectorAll('details:not([open])').length"
    assert page.execute_script(closed) == 0
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert page.execute_script(_WIDTHS) == before
    assert page.execute_script(closed) == 3


@pytest.mark.long
def test_charts_follow_the_width_of_the_window(browser, addresses):
    """Curves that are smooth too."""
    show(browser, addresses["long"])
    size = {"width": 800, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        wait_for(browser, f"const a = (() => {{ {_WIDTHS} }})(); return Math.max(...a) <= 760")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("name", NAMES)
def test_a_phone_needs_no_sideways_scrolling(browser, addresses, name):
    """At 390 pixels only tables scroll, each within itself; charts fit."""
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        show(browser, addresses[name])
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        beyond = browser.execute_script(
            "return Array.from(document.querySelectorAll('.plot svg.main-svg'),"
            " (s) => s.getBoundingClientRect().right).filter((right) => right > 390)"
        )
        assert beyond == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_is_reached_by_keyboard(page):
    """The first stop skips to the report; every control has a name, and focus is seen."""
    page.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    first = page.switch_to.active_element
    assert first.text == "Skip to the report"
    assert first.get_attribute("href").endswith("#main")
    nameless = page.execute_script(
        "return Array.from(document.querySelectorAll('button, input, summary, a'))"
        ".filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.id)"
    )
    assert nameless == []
    style = page.execute_script(
        "const s = getComputedStyle(document.activeElement);return [s.outlineStyle, s.outlineWidth]"
    )
    assert style == ["solid", "3px"]


@pytest.mark.long
def test_layers_fold_by_keyboard(page):
    """Left folds, right unfolds, Enter does either."""
    fold = page.find_element(By.ID, "fold-seen")
    hidden = (
        "return Array.from(document.querySelectorAll('.tree tr')).filter((r) => r.hidden).length"
    )
    fold.send_keys(Keys.ARROW_LEFT)
    assert page.execute_script(hidden) == 3
    assert fold.get_attribute("aria-expanded") == "false"
    fold.send_keys(Keys.ARROW_RIGHT)
    assert page.execute_script(hidden) == 0
    page.find_element(By.ID, "fold-the module").send_keys(Keys.ENTER)
    assert page.execute_script(hidden) == 14


@pytest.mark.long
def test_operators_are_put_together_as_asked(page):
    """One table at a time, by a switch that says which."""
    shown = (
        "return Array.from(document.querySelectorAll('.choice')).filter((c) => !c.hidden)"
        ".map((c) => c.dataset.choice)"
    )
    assert page.execute_script(shown) == ["each alone"]
    page.find_element(By.ID, "choices-operators-2").send_keys(Keys.SPACE)
    assert page.execute_script(shown) == ["by module"]
    pressed = page.find_element(By.ID, "choices-operators-2").get_attribute("aria-pressed")
    assert pressed == "true"


@pytest.mark.long
def test_an_old_browser_has_the_tables(browser, addresses):
    """And is told why the pictures are missing."""
    script = {"source": "delete window.DecompressionStream"}
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    try:
        browser.get(addresses["real"])
        text = wait_for(browser, "return document.getElementById('trouble').textContent")
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert text.startswith("This browser is too old to draw the pictures;")
    press(browser, "#table-stages thead th:nth-child(2) button")
    assert column(browser, "table-stages", 1)[0] == "16,448"


@pytest.mark.long
def test_a_chart_that_fails_leaves_the_others(page):
    """And says so on top."""
    page.execute_script("views.clear(); facts.charts.loss.series = null; drawInTurn()")
    said = wait_for(page, "return document.getElementById('trouble').textContent")
    assert said.startswith('"Loss of every execution" can\'t be drawn: ')
    wait_for(page, "return viewOf('operators').drawn")


@pytest.mark.long
def test_without_motion(page):
    """Who wants no motion gets none."""
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        behaviour = "return getComputedStyle(document.documentElement).scrollBehavior"
        assert page.execute_script(behaviour) == "auto"
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
