"""The table of events, and what is derived from it."""

import inspect
import re
from pathlib import Path

from ipufit.callbacks import Asynchronous, Callback
from ipufit.callbacks.callback import EVENTS

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"


def row(event):
    """The line of the page for an event."""
    when = event.when.replace("``", "`")
    hook = f"{event.hook}({', '.join(event.arguments)})"
    return f"| `{hook}` | {when[0].lower()}{when[1:]} |"


def test_the_page_has_a_row_for_every_event():
    """In the order of the class, with the words of its docstrings."""
    page = PAGE.read_text(encoding="utf-8")
    table = re.search(r"^\| hook \|.*\n\|[- |]+\n((?:\|.*\n)*)", page, re.M)[1]
    assert table.splitlines() == [row(event) for event in EVENTS.values()]


def test_every_hook_is_an_event():
    """So that nothing has to list them a second time."""
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    assert sorted(EVENTS) == hooks
    assert EVENTS["on_epoch_end"].arguments == ("epoch", "logs")
    assert [e.hook for e in EVENTS.values() if e.is_end_of_run] == [
        "on_train_end",
        "on_test_end",
        "on_predict_end",
    ]
    assert [e.hook for e in EVENTS.values() if e.is_of_batch] == [
        hook for hook in EVENTS if "_batch_" in hook
    ]


def test_asynchronous_passes_every_event_on():
    """With the arguments that the hook has."""
    for hook in EVENTS:
        assert hook in vars(Asynchronous)
        passed_on = inspect.signature(getattr(Asynchronous, hook))
        assert passed_on == inspect.signature(getattr(Callback, hook))
