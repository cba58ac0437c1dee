"""The page: what is in it, that nothing in it does harm, and that it stays small."""

import base64
import dataclasses
import gzip
import hashlib
import html.parser
import importlib.util
import json
import math
import re

import pytest

from ipufit.errors import ConfigurationError
from ipufit.report.page import document, render_page, render_state
from ipufit.report.page.sections import thinned
from ipufit.report.rows import COLUMNS
from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES
from tests.report.made import HOSTILE, long, trained, with_operators

pytest.importorskip("plotly")

LIMIT = 5_000_000


class Page(html.parser.HTMLParser):
    """What a browser finds: elements, texts, and scripts by their types."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.scripts, self._script = [], [], {}, None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "script":
            self._script = dict(attributes).get("type", "")

    def handle_endtag(self, tag):
        if tag == "script":
            self._script = None

    def handle_data(self, text):
        if self._script is None:
            self.texts.append(text)
        else:
            self.scripts[self._script] = self.scripts.get(self._script, "") + text

    @property
    def facts(self):
        return json.loads(self.scripts["application/json"])

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self):
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real one, without what is said against it."""
    found = trained(tmp_path_factory.mktemp("page") / "run", epochs=2, samples=160)
    return dataclasses.replace(found, facts={**found.facts, "warnings": []})


def without(run, *names):
    facts = {name: value for name, value in run.facts.items() if name not in names}
    return dataclasses.replace(run, facts=facts)


def cells(page, name):
    """The texts of a table, row by row."""
    body = page.partition(f'id="{name}"')[2].partition("</table>")[0]
    return [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.S)]
        for row in re.findall(r"<tr.*?>(.*?)</tr>", body, re.S)
    ]


@pytest.mark.long
def test_fit_writes_the_page(run):
    """It is what render_page makes, and has every section in the navigation."""
    with open(f"{run.folder}/report.html", encoding="utf-8") as file:
        text = file.read()
    assert text == render_page([Run.read(run.folder)])
    page = Page(render_page([run]))
    anchors = [each["href"] for each in page.named("a") if each["href"].startswith("#")]
    sections = ["summary", "curves", "time", "pipeline", "memory", "operators", "layers"]
    assert anchors == ["#main", *(f"#{name}" for name in sections)]
    assert [each["id"] for each in page.named("section")] == sections
    assert len(page.ids) == len(set(page.ids))


def test_every_chart_has_a_place_and_words(run):
    """A figure that is named and described by elements that are there, and the facts to draw it."""
    page = Page(render_page([with_operators(run)]))
    figures = page.named("figure")
    assert [each["data-chart"] for each in figures] == list(page.facts["charts"])
    assert len(figures) > 10
    for each in figures:
        assert {each["aria-labelledby"], each["aria-describedby"]} <= set(page.ids)
        assert each["tabindex"] == "0"


@pytest.mark.long
def test_the_loss_of_every_execution_is_in_the_page(run):
    """To six digits, by updates and by seconds."""
    (series,) = Page(render_page([run])).facts["charts"]["loss"]["data"]
    assert series["y"] == pytest.approx(run.rows["loss"], rel=1e-5)
    assert series["x"] == [float(i + 1) for i in range(len(series["y"]))]
    phases = zip(*(run.rows[phase] for phase in PHASES))
    ends = [begin + sum(spent) for begin, spent in zip(run.rows["begin"], phases)]
    assert series["meta"]["time"] == pytest.approx(ends, rel=1e-5)


def test_the_numbers_of_the_pipeline_are_those_of_the_plan(run):
    """Every task is drawn where the plan has it, and the shares have all their digits."""
    text = render_page([run])
    line = run.facts["plan"]["timeline"]
    found = dict(re.findall(r'<data value="(.*?)" id="plan-(.*?)">', text))
    named = {name: float(value) for value, name in found.items()}
    assert named["utilisation"] == line["utilisation"]
    assert named["bubble"] == 1 - line["utilisation"]
    assert named["total"] == line["total"]
    forward, backward = Page(text).facts["charts"]["timeline"]["data"]
    drawn = []
    for is_backward, series in enumerate((forward, backward)):
        bars = zip(series["y"], series["text"], series["base"], series["x"])
        drawn += [(y, int(label), bool(is_backward), base, x) for y, label, base, x in bars]
    tasks = [(s, m, back, begin, end - begin) for s, m, back, begin, end in line["tasks"]]
    assert [pytest.approx(task, abs=1e-8) for task in sorted(tasks)] == sorted(drawn)


def test_a_share_that_the_pipeline_never_reaches_is_told_as_that(run):
    """It was "80.0 % busy from: never"."""
    least = {"0.8": 12, "0.9": None}
    plan = {**run.facts["plan"], "least_accumulation": least}
    text = render_page([dataclasses.replace(run, facts={**run.facts, "plan": plan})])
    assert re.findall(r"<dt>([^<]* busy[^<]*)</dt><dd>(.*?)</dd>", text) == [
        ("80.0 % busy", "from gradient_accumulation=12"),
        ("90.0 % busy", "never"),
    ]


@pytest.mark.long
def test_times_by_phase_add_up(run):
    """The table has every phase; its last row is the length of the run."""
    page = render_page([long(run)])
    rows = cells(page, "table-phases")
    assert rows[0] == ["phase", "time", "share"]
    assert rows[3] == ["compute", "43.2 s", "73.8 %"]
    assert rows[-1] == ["all", "58.5 s", "100.0 %"]
    assert len(rows) == 13


@pytest.mark.long
def test_operators_are_grouped_and_held_against_the_peak(run):
    """By operator, by module and by line; shares of what the machine reached."""
    page = render_page([with_operators(run)])
    first = cells(page, "table-operators-operator")[1]
    assert first[:4] == ["convolution_backward", "backward", "2", "1.51 ms"]
    assert first[4:] == ["50.3 %", "2.7 M", "1.8 GFLOP/s", "2.0 %", "283.2 KiB", "1.7 %"]
    modules = {row[0]: row for row in cells(page, "table-operators-module")}
    assert "outside of modules" in modules
    lines = cells(page, "table-operators-line")
    assert [row[0] for row in lines[1:]] == ["made.py:26", "made.py:28", "made.py"]
    layers = {row[0]: row for row in cells(page, "table-layers")}
    whole = next(row for name, row in layers.items() if name.endswith("the module"))
    assert whole[4:6] == ["3.00 ms", "4.9 M"]


@pytest.mark.long
def test_memory_over_a_micro_batch_stands_on_what_is_there_all_the_time(run):
    """The sum of all areas at the highest place is the total."""
    run = with_operators(run)
    found = run.facts["operators"]["memory"]
    series = Page(render_page([run])).facts["charts"]["memory-operators"]["data"]
    highest = max(sum(each["y"][place] for each in series) for place in range(13))
    assert highest * 1024 == pytest.approx(found["total"], rel=1e-5)


@pytest.mark.few("<script>alert('1')</script>\"><img src=x onerror=alert(2)>", "' onx='")
@pytest.mark.parametrize(
    "hostile",
    [
        HOSTILE,
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "javascript:alert(1)",
        "' onx='",
    ],
)
def test_names_stay_text(run, hostile):
    """Of modules, classes, operators, files, settings, warnings, values and folders."""
    facts = {
        **run.facts,
        "title": hostile,
        "error": hostile,
        "explain": [hostile],
        "environment": {"engine": hostile, "device": hostile, hostile: hostile},
        "params": {hostile: hostile},
        "layers": [{**layer, "name": hostile, "kind": hostile} for layer in run.facts["layers"]],
        "warnings": [
            {"text": hostile, "cure": hostile, "kind": kind, "place": hostile, "count": 2}
            for kind in ("warning", "advice", hostile)
        ],
        "history": {
            "epoch": [0],
            "history": {hostile: [[0, 1.0]], f"val_{hostile}": [[0, 1.0]]},
            "updates": {hostile: [[1, 1.0]]},
        },
    }
    run = with_operators(dataclasses.replace(run, folder=f"/x/{hostile}", facts=facts), hostile)
    for runs in ([run], [run, run]):
        plain = Page(render_page(runs).replace(hostile, ""))
        page = Page(render_page(runs))
        assert any(hostile in text for text in page.texts)
        assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
        assert not page.named("img")
        assert len(page.named("script")) == 3
        for tag, attributes in page.elements:
            assert not [name for name in attributes if name.startswith("on")]
            assert set(attributes) & {"src", "srcset", "action"} == set()
            assert tag != "a" or attributes["href"].startswith("#")
        assert "<" not in page.scripts["application/json"]


def test_facts_can_stand_in_a_script():
    """Nothing in them ends it, and they are read back as they were."""
    value = {"</script>": "<!-- & \u2028\u2029 é \" '"}
    text = document.data(value)
    assert re.fullmatch(r"[ -~]*", text)
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_only_its_own_scripts_may_run(run):
    """The policy names both by their digests, and nothing may be fetched."""
    page = Page(render_page([run]))
    (policy,) = [m["content"] for m in page.named("meta") if "http-equiv" in m]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    plotly = gzip.decompress(base64.b64decode(page.scripts["text/plain"]))
    own = page.scripts[""].encode("utf-8")
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (own, plotly)]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert rules["default-src"] == rules["connect-src"] == "'none'"
    live = Page(render_page([run], live=True))
    (policy,) = [m["content"] for m in live.named("meta") if "http-equiv" in m]
    assert dict(rule.split(" ", 1) for rule in policy.split("; "))["connect-src"] == "'self'"


def test_the_text_is_there_before_any_script(run):
    """A browser shows what it has read while the scripts still come."""
    text = render_page([run])
    assert text.count("<script") == 3
    assert text.index("</footer>") < text.index("<script")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_plotly_is_compiled_in_one_go(end):
    """Its outer function stands in parentheses; another form of script is left as it is."""
    begin = b"(function(a, b) { b() } (typeof self !== 'undefined' ? "
    text = begin + b"self : this, () => {\nreturn 1;\n}));" + end
    wanted = begin + b"self : this, (() => {\nreturn 1;\n})));\n"
    assert document._called_at_once(text) == wanted
    for other in (b"!function(){}();", wanted, text + b"f();", 2 * text):
        assert document._called_at_once(other) == other


@pytest.mark.long
def test_a_curve_of_many_points_says_how_it_is_drawn(run):
    """And one of fewer does not; all points are in the page either way."""
    said = "Drawn with the smallest and largest value of each interval; zoom in to see all."
    for executions, is_said in ((2000, False), (2001, True)):
        page = Page(render_page([long(run, executions)]))
        assert len(page.facts["charts"]["loss"]["data"][0]["y"]) == executions
        assert (said in "".join(page.texts)) == is_said
    assert page.facts["points"] == 2000


def test_a_long_run_stays_small(run):
    """Two of the longest that is kept, with half as many logged values."""
    run = long(with_operators(run), 20_000)
    assert len(render_page([run, run]).encode("utf-8")) < LIMIT
    assert len(render_state(run)) < LIMIT / 4


def test_many_of_everything_stay_small(run):
    """Epochs, operators, layers, names of logged values and tasks of a pipeline are bounded."""
    run = with_operators(run)
    facts = dict(run.facts)
    rows = facts["operators"]["rows"]
    facts["operators"] = {
        **facts["operators"],
        "rows": [{**row, "module": f"m.{i}.{j}"} for i in range(60) for j, row in enumerate(rows)],
    }
    facts["layers"] = [{**facts["layers"][0], "name": f"l{i}", "depth": 1} for i in range(2500)]
    epochs = facts["epochs"]
    facts["epochs"] = [{**epochs[0], "epoch": i} for i in range(6000)]
    numbers = [[i, i / 7] for i in range(6000)]
    updates = {f"value {i}": numbers for i in range(30)}
    facts["history"] = {
        "epoch": list(range(6000)),
        "history": {"loss": numbers, **{f"val_m{i}": numbers[:3] for i in range(45)}},
        "updates": updates,
    }
    plan = facts["plan"]
    tasks = [[i % 4, i // 8, i % 8 > 3, i, i + 1] for i in range(8000)]
    facts["plan"] = {**plan, "timeline": {**plan["timeline"], "tasks": tasks, "total": 8001}}
    text = render_page([dataclasses.replace(run, facts=facts)])
    assert len(text.encode("utf-8")) < LIMIT
    texts = "".join(Page(text).texts)
    assert "The last 100 of 6,000 epochs" in texts
    assert "the first 600 of 780; the others take 1.2 % of the time" in texts
    assert "The tree of layers: the first 2,000 of 2,500" in texts
    assert "6 more values of epochs are not drawn: m39, m40, m41, m42, m43, m44." in texts
    assert "6 more logged values are not drawn" in texts
    assert "The first 1,600 are drawn; all numbers refer to the whole update." in texts


@pytest.mark.parametrize("status", ["running", "failed"])
def test_what_is_missing_says_why(run, status):
    """A run that has just begun, or that failed at once, has a page too."""
    kept = ("format", "status", "error", "begun", "title", "epochs")
    facts = {name: run.facts[name] for name in kept}
    facts.update(status=status, error="ValueError: no" if status == "failed" else "", epochs=[])
    empty = Run(run.folder, facts, {name: [] for name in COLUMNS})
    why = (
        "the run has not reached this point yet"
        if status == "running"
        else "the run ended before this was known"
    )
    text = render_page([empty])
    assert text.count(f"Not shown: {why}.") == 7
    assert ("ValueError: no" in text) == (status == "failed")
    assert Page(render_page([empty, run])).facts["charts"]
    assert json.loads(render_state(empty))["status"] == status


@pytest.mark.long
def test_a_page_of_a_run_that_goes_on_says_when_it_was_made(run):
    """Unless it follows the run by itself."""
    facts = {**run.facts, "status": "running"}
    texts = [
        " ".join("".join(Page(render_page([Run(run.folder, facts, run.rows)], live)).texts).split())
        for live in (False, True)
    ]
    assert "running when this page was made embedded engine, cpu" in texts[0]
    assert "running embedded engine, cpu" in texts[1]


def test_what_only_some_runs_have_is_shown_where_it_is(run):
    """Skipped updates, and the profile of an IPU."""
    facts = {**run.facts, "popvision": "/p/<v>"}
    rows = {**run.rows, "skipped": [2.0, *run.rows["skipped"][1:]]}
    text = render_page([Run(run.folder, facts, rows)])
    assert "<dt>Updates that were skipped</dt><dd>2</dd>" in text
    assert "PopVision's Graph Analyser opens the profile in /p/&lt;v&gt;." in text
    plain = render_page([run])
    assert "skipped" not in plain.partition("<main")[2].partition("</main>")[0]


def test_a_point_of_several_executions_says_so(run):
    """A long run has rows of several; a setting without end is cut, and says how long it is."""
    rows = {**run.rows, "executions": [4.0] * len(run.rows["loss"])}
    facts = {**run.facts, "params": {"weights": ["x" * 9] * 1000}}
    facts["operators"] = {"rows": []}
    text = render_page([Run(run.folder, facts, rows)])
    count = len(rows["loss"])
    assert f"{4 * count} executions in {count} points: loss " in text
    assert "xxx … (10,998 characters; run.json has them)" in text
    assert "Not shown: the micro-batch has no operators." in text


@pytest.mark.long
def test_reasons_are_passed_on(run):
    """Where a part of the facts says why it is missing."""
    facts = {**run.facts, "operators": {"missing": "no <time>"}, "plan": {"missing": "No plan."}}
    text = render_page([dataclasses.replace(run, facts=facts)])
    assert text.count("Not shown: no &lt;time&gt;.") == 2
    assert text.count("Not shown: No plan.") == 2


def test_numbers_that_are_not_finite_leave_a_gap(run):
    """In curves, tables and best values; JSON of a page has no NaN."""
    facts = dict(run.facts)
    values = {"loss": [[0, "nan"], [1, "inf"]], "val_loss": [[0, "nan"], [1, 2.5]]}
    facts["history"] = {"epoch": [0, 1], "history": values, "updates": {}}
    rows = {**run.rows, "loss": [math.nan, *run.rows["loss"][1:]]}
    text = render_page([dataclasses.replace(run, facts=facts, rows=rows)])
    charts = Page(text).facts["charts"]
    assert charts["loss"]["data"][0]["y"][0] is None
    assert charts["epoch-0"]["data"][0]["y"] == [None, None]
    assert charts["epoch-0"]["data"][1]["y"] == [None, 2.5]
    assert cells(text, "table-values")[1:] == [
        ["loss", "inf", "inf", "2", "smaller"],
        ["val_loss", "2.5", "2.5", "2", "smaller"],
    ]


@pytest.mark.long
def test_warnings_come_first_with_their_cures(run):
    """Advice before what Python warned of, and no section without any."""
    said = {
        "category": "UserWarning",
        "place": "a.py:3",
        "kind": "warning",
        "text": "Slow.",
        "cure": "",
        "count": 3,
    }
    advice = {"kind": "advice", "text": "Waits.", "cure": "Prefetch.", "count": 1}
    facts = {**run.facts, "warnings": [said, advice]}
    text = render_page([dataclasses.replace(run, facts=facts)])
    assert Page(text).named("section")[0]["id"] == "warnings"
    body = text.partition('<section id="warnings"')[2].partition("</section>")[0]
    plain = re.sub(r"<[^>]*>\s*", "|", body)
    assert re.sub(r"\|+", "|", plain).split("|")[2:-1] == [
        *("Advice", "Waits.", "What to do: ", "Prefetch."),
        *("Warnings", "Slow.", "UserWarning · a.py:3 · 3 times"),
    ]
    assert "warnings" not in [each["id"] for each in Page(render_page([run])).named("section")]


def test_two_runs_stand_side_by_side(run):
    """What differs is marked, curves lie over each other, and operators have ratios."""
    first = with_operators(run)
    operators = first.facts["operators"]
    slow = [{**row, "seconds": 2 * row["seconds"]} for row in operators["rows"]]
    params = {**first.facts["params"], "seed": "other"}
    plan = {**first.facts["plan"], "gradient_accumulation": 9}
    facts = {
        **first.facts,
        "operators": {**operators, "rows": slow},
        "params": params,
        "plan": plan,
    }
    second = dataclasses.replace(long(dataclasses.replace(first, facts=facts)), folder="/x/second")
    text = render_page([first, second])
    page = Page(text)
    assert [each["id"] for each in page.named("section")] == [
        *("summary", "curves", "time", "plans", "operators"),
    ]
    rows = {row[0]: row[1:] for row in cells(text, "table-params")}
    assert rows["seed"] == [str(run.facts["params"]["seed"]), "other", "≠ differs"]
    assert rows["engine"] == ["embedded", "embedded", "same"]
    assert list(rows)[1] == "seed"
    assert cells(text, "table-plans")[2] == ["gradient accumulation", "7", "9", "≠ differs"]
    ratios = cells(text, "table-operators-operator")
    assert ratios[0][2:] == ["run", "second", "second / run"]
    assert {row[4] for row in ratios[1:]} == {"2.00 ×"}
    names = [series["name"] for series in page.facts["charts"]["loss"]["data"]]
    assert names == ["run", "second"]
    assert len(page.facts["charts"]["loss"]["data"][1]["y"]) == 10_000


def test_runs_with_the_same_name_have_their_paths(run):
    """And the same run twice is told apart too."""
    other = dataclasses.replace(run, folder="/elsewhere/run")
    names = [s["name"] for s in Page(render_page([run, other])).facts["charts"]["loss"]["data"]]
    assert names == [run.folder, "/elsewhere/run"]
    names = [s["name"] for s in Page(render_page([run, run])).facts["charts"]["loss"]["data"]]
    assert names == [f"{run.folder} (1)", f"{run.folder} (2)"]


def test_a_state_has_the_parts_of_the_page(run):
    """The same markup and the same facts."""
    state = json.loads(render_state(run))
    text = render_page([run], live=True)
    assert state["status"] == "finished"
    assert list(state["sections"]) == [each["id"] for each in Page(text).named("section")]
    assert all(part in text for part in state["sections"].values())
    assert state["charts"] == Page(text).facts["charts"]
    assert state["navigation"] in text
    assert state["subtitle"] in text


def test_every_template_escapes_what_it_shows():
    """Whatever is put into one: autoescape is on for all of them, and none switches it off."""
    templates = document._templates()
    shown = templates.from_string("<p title='{{ text }}'>{{ text }}</p>").render(text="<b>&'\"")
    assert shown == "<p title='&lt;b&gt;&amp;&#39;&#34;'>&lt;b&gt;&amp;&#39;&#34;</p>"
    for name in templates.list_templates():
        source, _, _ = templates.loader.get_source(templates, name)
        assert not re.search(r"\|\s*safe|autoescape", source), name


def test_thinned_curves_keep_their_extremes():
    """Of every stretch the smallest and the largest, in their order."""
    values = [float((i * 37) % 1009) for i in range(10_000)]
    values[123], values[777] = -5.0, 5000.0
    x, y = thinned(list(range(10_000)), values, 100)
    assert len(x) <= 100
    assert (x[y.index(-5.0)], x[y.index(5000.0)]) == (123, 777)
    assert x == sorted(x)
    assert thinned([1, 2], [None, 3.0], 2) == ([1, 2], [None, 3.0])


def test_without_plotly_the_page_says_what_to_install(run, monkeypatch):
    """As fit does before it begins."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    document.library.cache_clear()
    with pytest.raises(ConfigurationError) as caught:
        render_page([run])
    document.library.cache_clear()
    assert str(caught.value) == (
        "the page of a report draws its curves with plotly, which is not installed. Run: "
        "pip install ipufit[report]"
    )


@pytest.mark.long
def test_time_over_a_long_run_is_that_of_its_executions(run):
    """Areas of means, from the first update to the last; a short run has a bar for each."""
    chart = Page(render_page([long(run)])).facts["charts"]["phases-executions"]
    assert {series["stackgroup"] for series in chart["data"]} == {"all"}
    compute = next(series for series in chart["data"] if series["name"] == "compute")
    x, y = compute["x"], compute["y"]
    assert (x[0], x[-1], len(x), len(y)) == (1, 40_001, 151, 151)
    seconds = long(run).rows["compute"]
    assert y[0] == pytest.approx(1000 * sum(seconds[:67]) / 67, rel=1e-4)
    short = Page(render_page([run])).facts["charts"]["phases-executions"]
    assert {series["type"] for series in short["data"]} == {"bar"}
    assert short["data"][0]["x"] == [str(i + 1) for i in range(len(run.rows["loss"]))]
