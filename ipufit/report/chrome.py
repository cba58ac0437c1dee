"""Trace of a run in the Trace Event Format, for viewers such as Perfetto."""

from __future__ import annotations

import itertools
import json
import math
import operator
from typing import Dict, List, Mapping, Optional, Sequence, Set

from ipufit.report.rows import ExecutionTable, columns_of
from ipufit.report.run import Facts, Run, plain
from ipufit.utils.phase_timer import PHASES

# Numbers of executions, by column.
Row = Mapping[str, float]


class _Lane:
    """A thread of the trace, whose events come in the order of time and never overlap.

    Clocks are read one after another, so that what follows without a gap may seem to begin before
    its forerunner ends, by less than a microsecond: it is drawn from that end on.

    Args:
        events: where they go.
        process, thread: numbers of this one.

    Attributes:
        end: of the last event, in nanoseconds.
    """

    def __init__(self, events: _Events, process: int, thread: int) -> None:
        self._events = events
        self._where = f'"pid":{process},"tid":{thread}'
        self.end = 0

    def add(
        self, name: str, begin: int, length: int, args: Optional[Mapping[str, object]] = None
    ) -> int:
        """Add an event, in nanoseconds; nothing is drawn of one that takes no time.

        Returns:
            Where it begins: no earlier than the end of the one before.
        """
        begin = max(begin, self.end)
        self.end = begin + length
        if length > 0:
            self.within(name, begin, length, args)
        return begin

    def within(
        self, name: str, begin: int, length: int, args: Optional[Mapping[str, object]] = None
    ) -> None:
        """Add an event that lies within the last one."""
        more = f',"args":{_text(args)}' if args else ""
        times = f'"ts":{_microseconds(begin)},"dur":{_microseconds(length)}'
        self._events.put(f'{{"name":{_text(name)},"ph":"X",{self._where},{times}{more}}}')


class _Events:
    """Collects the events of a trace as JSON texts, since there may be many."""

    def __init__(self) -> None:
        self._texts: List[str] = []

    def put(self, text: str) -> None:
        """Add an event that is JSON already."""
        self._texts.append(text)

    def lane(self, process: int, thread: int, name: str) -> _Lane:
        """Name a thread of a process and return its lane."""
        self._name("thread_name", process, thread, name=name)
        self._name("thread_sort_index", process, thread, sort_index=thread)
        return _Lane(self, process, thread)

    def process(self, process: int, name: str) -> None:
        """Name a process; they are shown in the order of their numbers."""
        self._name("process_name", process, 0, name=name)
        self._name("process_sort_index", process, 0, sort_index=process)

    def _name(self, kind: str, process: int, thread: int, **args: object) -> None:
        event = {"name": kind, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": args}
        self.put(_text(event))

    def count(self, process: int, name: str, at: int, value: float) -> None:
        """Set a counter from this time on; a value that is not finite is left out."""
        if math.isfinite(value):
            times = f'"ts":{_microseconds(at)},"args":{{"value":{value:.7g}}}'
            self.put(f'{{"name":{_text(name)},"ph":"C","pid":{process},{times}}}')

    def text(self, about: Mapping[str, object]) -> str:
        """Return the whole trace, with remarks about it."""
        head = f'{{"displayTimeUnit":"ms","otherData":{_text(about)},"traceEvents":[\n'
        return head + ",\n".join(self._texts) + "\n]}\n"


def _microseconds(nanoseconds: int) -> str:
    """Format nanoseconds in microseconds, the unit of the format."""
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# So many phases, points of a counter, and tasks of an update are drawn at most: the file stays
# below 20 MB.
MOST_PHASES = 140_000
MOST_COUNTS = 10_000
MOST_TASKS = 10_000

_HOST, _PIPELINE, _OPERATORS = 1, 2, 3
_DIRECTIONS = ("forward", "backward", "optimizer")


def render_trace(run: Run) -> str:
    """Render a run as JSON of the Trace Event Format, below 20 MB.

    Where events are not drawn as they were measured, ``otherData`` says how.

    Args:
        run: also one that is not over.
    """
    events = _Events()
    about: Dict[str, object] = {
        "title": run.facts["title"],
        "begun": run.facts["begun"],
        "status": run.facts["status"],
        "seconds by phase": plain(run.facts.get("phases", {})),
    }
    _host(events, run, about)
    _pipeline(events, run, about)
    _operators(events, run.facts.get("operators", {}), about)
    return events.text(about)


def _host(events: _Events, run: Run, about: Dict[str, object]) -> None:
    """Draw epochs, executions and counters of the host."""
    events.process(_HOST, "host")
    epochs = run.facts["epochs"]
    about["phases"] = (
        "For each execution the time of each phase is measured, but not their order: phases are "
        "drawn in a fixed order. After the last execution of an epoch come its validation and the "
        "remaining phases, drawn in the same way. They are left out if executions of two epochs "
        "are merged, or a run resumed within an epoch."
    )
    lane = events.lane(_HOST, 1, "epochs")
    for each in epochs:
        args = {
            **{name: each[name] for name in ("first_update", "updates", "executions", "samples")},
            "seconds": {name: value for name, value in each["phases"].items() if value},
        }
        lane.add(f"epoch {each['epoch'] + 1}", _time(each["begin"]), _time(each["seconds"]), args)
    rows = _rows(run.rows, about)
    _unfinished(lane, rows, {each["epoch"] for each in epochs})
    _executions(events.lane(_HOST, 2, "executions"), rows, epochs)
    _counters(events, rows, about)


def _rows(columns: Dict[str, List[float]], about: Dict[str, object]) -> List[Dict[str, float]]:
    """Return the executions, each with the sum of its seconds."""
    if sum(1 for name in PHASES for seconds in columns[name] if seconds) > MOST_PHASES:
        about["executions"] = "Two in a row are drawn as one."
        rows = ExecutionTable(len(columns["begin"]) // 2 * 2)
        rows.take(columns, math.inf)
        columns = columns_of(rows.flat)
    executions = []
    for values in zip(*columns.values()):
        row: Dict[str, float] = dict(zip(columns, values))
        row["seconds"] = sum(row[name] for name in PHASES)
        executions.append(row)
    return executions


def _unfinished(lane: _Lane, rows: Sequence[Row], finished_epochs: Set[int]) -> None:
    """Draw the epoch in which a run stands, or in which it broke off."""
    unfinished = [row for row in rows if row["epoch"] not in finished_epochs]
    if unfinished:
        begin, end = unfinished[0]["begin"], unfinished[-1]["begin"] + unfinished[-1]["seconds"]
        args = {"first_update": int(unfinished[0]["first_update"]), "finished": False}
        lane.add(f"epoch {unfinished[0]['epoch'] + 1:.0f}", _time(begin), _time(end - begin), args)


def _executions(lane: _Lane, rows: Sequence[Row], epochs: Sequence[Facts]) -> None:
    ends = {each["epoch"]: each for each in epochs}
    for epoch, of_epoch in itertools.groupby(rows, operator.itemgetter("epoch")):
        epoch_rows = list(of_epoch)
        for row in epoch_rows:
            _execution(lane, row)
        if epoch in ends:
            _rest(lane, epoch_rows, ends[epoch])


def _execution(lane: _Lane, row: Row) -> None:
    lengths = {name: _time(row[name]) for name in PHASES}
    first, count, updates = (int(row[n]) for n in ("first_update", "executions", "updates"))
    name = "execution" if count == 1 else f"{count} executions"
    args = {"update": first, "updates": updates, "samples": int(row["samples"])}
    begin = lane.add(name, _time(row["begin"]), sum(lengths.values()), args)
    for phase, length in lengths.items():
        if length:
            lane.within(phase, begin, length)
            begin += length


def _rest(lane: _Lane, epoch_rows: Sequence[Row], epoch: Facts) -> None:
    """Draw what an epoch did after its last execution.

    Nothing is drawn where rows of two epochs are joined, or the epoch began in an earlier part of
    the run: the seconds can't be told apart then.
    """
    if sum(row["executions"] for row in epoch_rows) != epoch["executions"]:
        return
    for name in sorted(PHASES, key=lambda name: name != "validation"):
        length = _time(epoch["phases"][name]) - sum(_time(row[name]) for row in epoch_rows)
        # What is left of rounding is no event.
        if length > 1000:
            after = {"after the executions of epoch": epoch["epoch"] + 1}
            lane.add(name, lane.end, length, after)


def _counters(events: _Events, rows: Sequence[Row], about: Dict[str, object]) -> None:
    step = -(-len(rows) // MOST_COUNTS) or 1
    if step > 1:
        about["counters"] = f"Counters show the first of {step} consecutive executions."
    before: Dict[str, float] = {}
    for row in rows[::step]:
        values = {
            "loss": row["loss"],
            "samples/s": row["samples"] / row["seconds"] if row["seconds"] else 0.0,
            "memory": row["memory"],
            "learning rate": row["learning_rate"],
            "loss scale": row["loss_scale"],
        }
        for name, value in values.items():
            # A counter keeps its value until it gets another one.
            if before.get(name) != value:
                events.count(_HOST, name, _time(row["begin"]), value)
        before = values


def _pipeline(events: _Events, run: Run, about: Dict[str, object]) -> None:
    """Draw the estimated pipeline of one update on the IPUs of a replica."""
    line = run.facts.get("plan", {}).get("timeline")
    if line is None:
        return
    events.process(_PIPELINE, "pipeline (estimated)")
    # The mean of the program's seconds; 0 without updates.
    updates = sum(run.rows["updates"])
    update = sum(run.rows["compute"]) / updates if updates else 0.0
    scale = update / line["total"] if update and line["total"] else 1.0
    tasks = line["tasks"][:MOST_TASKS]
    about["pipeline"] = {
        "what": "one update, as the plan estimates it",
        "schedule": line["schedule"],
        "utilisation": line["utilisation"],
        "one second is": "one second: the estimate is scaled to the measured mean of an update"
        if update
        else "the estimated time of one micro-batch through all stages and back",
        "tasks left out": len(line["tasks"]) - len(tasks),
    }
    places = run.facts["plan"].get("places")
    lanes = [
        events.lane(
            _PIPELINE, stage + 1, f"stage {stage}{f' on IPU {places[stage]}' if places else ''}"
        )
        for stage in range(1 + max((task[0] for task in tasks), default=-1))
    ]
    for stage, micro_batch, is_backward, begin, end in tasks:
        start = _time(begin * scale)
        name = f"{'backward' if is_backward else 'forward'} {micro_batch}"
        lanes[stage].add(name, start, _time(end * scale) - start)


def _operators(events: _Events, operators: Facts, about: Dict[str, object]) -> None:
    """Draw the operators of one micro-batch, a lane for each direction."""
    if not operators.get("rows"):
        return
    events.process(_OPERATORS, "operators (one micro-batch)")
    about["operators"] = (
        "Each event stands for all calls of one operator on one source line in one micro-batch; "
        "events are drawn one after another, in the order of the report's table."
    )
    lanes: Dict[str, _Lane] = {}
    for row in operators["rows"]:
        way = row["direction"]
        if way not in lanes:
            directions = [*_DIRECTIONS, *(name for name in lanes if name not in _DIRECTIONS), way]
            lanes[way] = events.lane(_OPERATORS, directions.index(way) + 1, way)
        names = ("module", "kind", "calls", "flops", "bytes", "source", "file", "line")
        args = {name: row[name] for name in names if row.get(name) not in (None, "")}
        lanes[way].add(row["operator"], lanes[way].end, _time(row["seconds"]), args)


def _time(seconds: float) -> int:
    """Convert seconds to nanoseconds."""
    return round(seconds * 1e9)
