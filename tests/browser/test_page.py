"""The page in a real browser."""

import base64

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ipufit.report.page.sections import DRAWN, rounded
from tests.browser.conftest import (
    come_to,
    complaints,
    opened_browser,
    requests,
    show,
    wait_for,
)
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
        "return [p._fullLayout.xaxis.range.slice(), p._fullLayout.xaxis.autorange];",
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


def drawn(browser):
    """Names of the charts that have a picture."""
    return browser.execute_script(
        "return figures().filter((f) => f.querySelector('svg.main-svg'))"
        ".map((f) => f.dataset.chart)"
    )


def test_charts_are_drawn_when_they_come_near(browser, addresses):
    """Not before; and nothing in the page moves when they come."""
    places = "return Array.from(document.querySelectorAll('figure, section'), (e) => e.offsetTop)"
    show(browser, addresses["long"], all_charts=False)
    before = browser.execute_script(places)
    assert not {"throughput", "timeline", "memory-process", "operators"} & set(drawn(browser))
    come_to(browser, "chart-operators")
    assert not {"throughput", "timeline"} & set(drawn(browser))
    assert "operators" in drawn(browser)
    browser.execute_script("document.documentElement.style.scrollBehavior = 'auto'")
    press(browser, "nav a[href='#time']")
    wait_for(browser, "return !isDue(byId('chart-phases-epochs'))")
    browser.find_element(By.ID, "chart-timeline").send_keys("+")
    assert "timeline" in drawn(browser)
    for figure in browser.execute_script("return figures().map((f) => f.id)"):
        come_to(browser, figure)
    assert browser.execute_script(places) == before
    assert complaints(browser) == []


def test_a_page_behind_others_draws_its_first_charts(browser, addresses):
    """Where no frame is shown, and nothing is told to come into view."""
    source = (
        "Object.defineProperty(Document.prototype, 'hidden', {get: () => true});"
        "window.requestAnimationFrame = () => 0;"
        "window.IntersectionObserver = class { observe() {} }"
    )
    size = {"width": 1200, "height": 1500, "deviceScaleFactor": 1, "mobile": False}
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        show(browser, addresses["real"], all_charts=False)
        assert "loss" in drawn(browser)
        assert "operators" not in drawn(browser)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_long_curve_is_drawn_by_its_extremes(browser, addresses, runs):
    """With no more points than a screen has columns for; zoomed into, it has every one."""
    show(browser, addresses["long"])
    counts = browser.execute_script(
        "return figures().flatMap((f) => f.querySelector('.plot').data.map((t) => t.x.length))"
    )
    assert max(counts) <= DRAWN + 2
    curve = "const t = document.querySelector('#chart-loss .plot').data[0]; return [t.x, t.y]"
    x, y = browser.execute_script(curve)
    losses = [rounded(value, 6) for value in runs.long.rows["loss"]]
    assert len(losses) == 10_000
    assert (min(y), max(y), y[0], y[-1]) == (min(losses), max(losses), losses[0], losses[-1])
    assert x == sorted(set(x))
    assert all(losses[update // 4 - 1] == value for update, value in zip(x, y))
    # The mean is that of all values.
    mean = "const t = document.querySelector('#chart-loss .plot').data[1]; return [t.x, t.y]"
    smooth = browser.execute_script("return smoothed(facts.charts.loss.data[0].y, 100)")
    assert all(
        smooth[update // 4 - 1] == value for update, value in zip(*browser.execute_script(mean))
    )
    for _ in range(4):
        press(browser, "#chart-loss-in")
    (begin, end), _ = ranges(browser, "loss")
    x, y = browser.execute_script(curve)
    within = [update for update in range(4, 40_001, 4) if begin <= update <= end]
    assert len(within) == pytest.approx(625, abs=2)
    assert [update for update in x if begin <= update <= end] == within
    assert (x[0], x[-1], max(y)) == (4, 40_000, max(losses))
    press(browser, "#chart-loss-reset")
    assert len(browser.execute_script(curve)[0]) <= DRAWN + 2


def test_gaps_of_long_curves_stay(page):
    """A value that is not finite, between two that are."""
    found = page.execute_script(
        "const y = Array.from({length: 5000}, (_, i) => (i === 2500 ? null : i % 7));"
        "const x = y.map((_, i) => i); return thinned(x, y, null).includes(2500)"
    )
    assert found


_SPENT = """
const at = (name) => performance.getEntriesByName(name)[0]?.startTime ?? 0;
const begin = performance.now();
drawAll();
const rest = performance.now() - begin;
return [Math.max(at("seen"), at("first-contentful-paint")), at("drawn"), at("drawn") + rest];
"""


@pytest.mark.long
def test_the_time_until_charts_of_10000_executions_are_drawn_is_told(addresses, capsys):
    """Told, not judged: how busy the machine is decides it. Size is judged in tests/report."""
    lines = ["10,000 executions, seconds from opening the page: in a new browser; then (of five)"]
    # What the other tests have noted of every request takes time of the page.
    for place in ("", "#curves"):
        spent = []
        with opened_browser(logs={}) as browser:
            for _ in range(6):
                browser.get("about:blank")
                show(browser, addresses["long"] + place, all_charts=False)
                spent.append(browser.execute_script(_SPENT))
                assert len(drawn(browser)) > 10
        first, *others = spent
        parts = ("all in sight", "charts near it", "all charts, at once")
        for part, new, later in zip(parts, first, zip(*others)):
            later = sorted(each / 1000 for each in later)
            told = f"{new / 1000:.2f}; {later[2]:.2f} ({later[0]:.2f} to {later[-1]:.2f})"
            lines.append(f"{place or 'top':8} {part:20} {told}")
    with capsys.disabled():
        print("", *lines, sep="\n")


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


def test_a_line_that_its_reader_hides_stays_hidden(browser, addresses):
    """When its chart is drawn anew, as it is every other second while a run is followed."""
    show(browser, addresses["two"])
    come_to(browser, "chart-loss")
    visible = "return document.querySelector('#chart-loss .plot')._fullData.map((t) => t.visible)"
    toggle = browser.find_element(By.CSS_SELECTOR, "#chart-loss .legendtoggle")
    ActionChains(browser).move_to_element(toggle).click().perform()
    wait_for(browser, f"{visible}.includes('legendonly')")
    hidden = browser.execute_script(visible)
    browser.execute_script("draw(document.getElementById('chart-loss'))")
    assert browser.execute_script(visible) == hidden


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
    ink = "return document.querySelector('#chart-loss .plot')._fullLayout.font.color"
    paper = "return getComputedStyle(document.body).backgroundColor"
    come_to(page, "chart-loss")
    light = page.execute_script(ink), page.execute_script(paper)
    scheme = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    try:
        wait_for(page, f"{ink} !== arguments[0]", light[0])
        dark = page.execute_script(ink), page.execute_script(paper)
        assert dark[1] != light[1]
        button = page.find_element(By.ID, "theme")
        assert button.get_attribute("aria-label") == "Change to the light look"
        # What is in sight changes at once.
        page.execute_script("arguments[0].click()", button)
        assert (page.execute_script(ink), page.execute_script(paper)) == light
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_prints(browser, addresses):
    """All pictures are there in light colours, and afterwards the screen is as it was."""
    show(browser, addresses["real"], all_charts=False)
    page = browser
    assert len(drawn(page)) < 10
    found = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert base64.b64decode(found["data"])[:5] == b"%PDF-"
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert drawn(page) == page.execute_script("return figures().map((f) => f.dataset.chart)")
    assert max(page.execute_script(_WIDTHS)) <= 660
    closed = "return document.querySelectorAll('details:not([open])').length"
    assert page.execute_script(closed) == 0
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    for figure in page.execute_script("return figures().map((f) => f.id)"):
        come_to(page, figure)
    fits = "return figures().every((f) => f.querySelector('.plot').layout.width === f.clientWidth)"
    assert page.execute_script(fits)
    assert page.execute_script(closed) == 3
    # Who prints before plotly.js is there is told.
    page.execute_script("window.Plotly = undefined; dispatchEvent(new Event('beforeprint'))")
    said = page.execute_script("return byId('trouble').textContent")
    assert said == "The pictures were not there yet when this was printed."


@pytest.mark.long
def test_charts_follow_the_width_of_the_window(browser, addresses):
    """Curves that are smooth too."""
    show(browser, addresses["long"])
    size = {"width": 800, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        wait_for(browser, "return figures().some(isDue)")
        for figure in browser.execute_script("return figures().map((f) => f.id)"):
            come_to(browser, figure)
        assert max(browser.execute_script(_WIDTHS)) <= 760
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
        "return Array.from(document.querySelectorAll('.choice')).filter((c) => c.offsetHeight)"
        ".map((c) => c.dataset.choice)"
    )
    assert page.execute_script(shown) == ["each alone"]
    page.find_element(By.ID, "choices-operators-2").send_keys(Keys.SPACE)
    assert page.execute_script(shown) == ["by module"]
    assert page.find_element(By.ID, "choices-operators-2").is_selected()


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
    page.execute_script("facts.charts.loss.data = null; drawn.delete(byId('chart-loss'))")
    page.execute_script("drawInTurn(100)")
    said = wait_for(page, "return document.getElementById('trouble').textContent")
    assert said.startswith('"Loss of every execution" can\'t be drawn: ')
    wait_for(page, "return !isDue(byId('chart-operators'))")


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
