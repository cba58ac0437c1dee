"""``ipufit watch``: a page for this machine alone, of a run that another process writes."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request
from pathlib import Path
from unittest import mock

import pytest

from ipufit.cli.main import main
from ipufit.errors import ConfigurationError
from ipufit.report import live_server
from ipufit.report.live_server import ADDRESS, PORT, Server, Watched
from ipufit.report.run import EXECUTIONS, FACTS, append_rows, write_rows
from ipufit.utils.files import write_text
from tests.report.runs_made import facts_of, flat_rows, written

ROOT = Path(__file__).resolve().parents[2]


class Counting:
    """Stands for the page, which is made elsewhere."""

    def __init__(self):
        self.pages = self.states = 0

    def render_page(self, run):
        self.pages += 1
        return f"<!doctype html><title>{run.facts['title']}</title>"

    def render_state(self, run):
        self.states += 1
        return json.dumps({"status": run.facts["status"], "rows": len(run.rows["begin"])})


@pytest.fixture
def making():
    return Counting()


@contextlib.contextmanager
def serving(folder, making):
    makers = {"_page": making.render_page, "_state": making.render_state}
    with mock.patch.multiple(live_server, **makers), Server(Watched(str(folder)), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", host=None, headers=()):
    """Status, headers and body of an answer."""
    connection = http.client.HTTPConnection(ADDRESS, server.server_port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", host or f"{ADDRESS}:{server.server_port}")
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_it_serves_the_page_and_its_news(tmp_path, making):
    written(tmp_path / "run")
    with serving(tmp_path / "run", making) as server:
        status, about, body = ask(server)
        assert (status, body) == (200, b"<!doctype html><title>Net</title>")
        assert about["Content-Type"] == "text/html; charset=utf-8"
        status, about, body = ask(server, "/state")
        assert (status, json.loads(body)) == (200, {"status": "finished", "rows": 6})
        assert about["Content-Type"] == "application/json; charset=utf-8"
        with urllib.request.urlopen(server.url) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("path", ["/", "/state", "/nothing"])
def test_no_answer_is_kept_shared_or_put_into_another_page(path, tmp_path, making):
    written(tmp_path / "run")
    with serving(tmp_path / "run", making) as server:
        _, about, _ = ask(server, path, headers=[("Origin", "http://example.org")])
    assert about["Cache-Control"] == "no-store"
    assert about["X-Content-Type-Options"] == "nosniff"
    assert about["X-Frame-Options"] == "DENY"
    assert about["Cross-Origin-Resource-Policy"] == "same-origin"
    policy = dict(rule.split(" ", 1) for rule in about["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not [name for name in about if name.lower().startswith("access-control")]
    assert "Python" not in about["Server"]


@pytest.mark.parametrize(
    "path", ["/run.json", "/executions.f64", "/state/", "/../etc/passwd", "/%2e%2e/", "/page"]
)
def test_there_is_nothing_else(path, tmp_path, making):
    written(tmp_path / "run")
    with serving(tmp_path / "run", making) as server:
        status, _, body = ask(server, path)
    assert (status, body) == (404, b"There is / and /state.\n")
    assert making.pages == making.states == 0


@pytest.mark.parametrize(
    ("method", "status"),
    [
        ("POST", 405),
        ("PUT", 405),
        ("DELETE", 405),
        ("OPTIONS", 405),
        ("PATCH", 405),
        ("TRACE", 501),
    ],
)
def test_nothing_can_be_done_to_it(method, status, tmp_path, making):
    written(tmp_path / "run")
    with serving(tmp_path / "run", making) as server:
        found, about, body = ask(server, method=method)
    assert (found, body) == (status, b"Only GET and HEAD.\n")
    assert about["X-Content-Type-Options"] == "nosniff"
    assert about.get("Allow") == ("GET, HEAD" if status == 405 else None)


def test_head_has_the_headers_alone(tmp_path, making):
    written(tmp_path / "run")
    with serving(tmp_path / "run", making) as server:
        _, whole, body = ask(server)
        status, about, nothing = ask(server, method="HEAD")
    assert (status, nothing) == (200, b"")
    assert about["Content-Length"] == whole["Content-Length"] == str(len(body))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{}", "127.0.0.1:1", "127.0.0.1", "127.0.0.1.evil:{}", ""]
)
def test_a_name_that_was_made_to_lead_here_is_refused(host, tmp_path, making):
    """Else a page of another site could read the report: its name may stand for any address."""
    written(tmp_path / "run")
    with serving(tmp_path / "run", making) as server:
        status, _, body = ask(server, host=host.format(server.server_port))
        assert (status, body) == (403, f"Open {server.url} instead.\n".encode())
        assert ask(server, "/state", host=f"LocalHost:{server.server_port}")[0] == 200
    assert making.pages == 0


def test_what_is_no_request_is_refused(tmp_path, making):
    with serving(tmp_path, making) as server, socket.create_connection(
        (ADDRESS, server.server_port), timeout=10
    ) as line:
        line.sendall(b"what?\r\n\r\n")
        assert b"Only GET and HEAD." in line.recv(10_000)


def test_only_this_machine_can_reach_it(tmp_path, making):
    with serving(tmp_path, making) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


def test_files_are_read_when_they_have_changed(tmp_path, making):
    folder = written(tmp_path / "run")
    with serving(folder, making) as server:
        for _ in range(3):
            ask(server)
            ask(server, "/state")
        assert (making.pages, making.states) == (1, 1)
        append_rows(str(folder), flat_rows(1, 1))
        assert json.loads(ask(server, "/state")[2])["rows"] == 7
        write_text(str(folder / FACTS), json.dumps(facts_of(2, 3, status="failed")))
        assert json.loads(ask(server, "/state")[2]) == {"status": "failed", "rows": 7}
        assert (making.pages, making.states) == (1, 3)


def test_it_waits_for_a_folder_that_is_not_there(tmp_path, making):
    folder = tmp_path / "<b>run"
    with serving(folder, making) as server:
        status, about, body = ask(server)
        assert (status, about["Retry-After"]) == (503, "2")
        assert b'<meta http-equiv="refresh" content="2">' in body
        assert b"Waiting for a run: " in body
        assert b"<b>" not in body
        status, _, body = ask(server, "/state")
        assert status == 503
        assert json.loads(body)["missing"].startswith("Waiting for a run: ")
        written(folder)
        assert ask(server)[0] == 200


def test_a_folder_of_something_else_is_said(tmp_path, making):
    (tmp_path / FACTS).write_text('{"format": "ipufit.Report/99"}')
    with serving(tmp_path, making) as server:
        status, _, body = ask(server, "/state")
    assert status == 503
    assert "must have the format" in json.loads(body)["missing"]


def test_a_page_that_fails_ends_nothing(tmp_path, making, capfd):
    def fail(run):
        raise ZeroDivisionError("<so>")

    written(tmp_path / "run")
    making.render_page = fail
    with serving(tmp_path / "run", making) as server:
        status, about, body = ask(server)
        assert (status, body) == (500, b"The page can't be made: ZeroDivisionError: <so>\n")
        assert about["Content-Type"] == "text/plain; charset=utf-8"
        assert ask(server, "/state")[0] == 200
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_run_that_writes_as_fast_as_it_can_never_shows_half_of_anything(tmp_path, making):
    """Facts are replaced, rows are appended in pieces that end anywhere, and tables rewritten."""
    folder = tmp_path / "run"
    whole = flat_rows(2, 30)
    data, ended, rounds = whole.tobytes(), threading.Event(), []

    def write():
        while not ended.is_set():
            write_rows(str(folder), whole[:0])
            for start in range(0, len(data), 1001):
                with open(folder / EXECUTIONS, "ab") as file:
                    file.write(data[start : start + 1001])
                facts = facts_of(2, 30, status="running", title="x" * (start % 4000))
                write_text(str(folder / FACTS), json.dumps(facts))
            rounds.append(len(data))

    def render_state(run):
        lengths = {len(column) for column in run.rows.values()}
        assert len(lengths) == 1
        assert run.rows["first_update"] == list(range(*lengths))
        return json.dumps([len(run.facts["title"]), *lengths])

    making.render_state = render_state
    written(folder, 2, 30)
    writer = threading.Thread(target=write)
    with serving(folder, making) as server:
        writer.start()
        try:
            seen, end = [], time.monotonic() + 60  # if nothing changes, it hangs
            while len(set(seen)) < 4 or not rounds:
                assert time.monotonic() < end
                status, _, body = ask(server, "/state")
                assert status == 200, body
                seen.append(json.loads(body)[1])
        finally:
            ended.set()
            writer.join()
    assert max(seen) <= 60


def test_a_port_in_use_is_an_error_that_says_what_to_do(tmp_path, making):
    with serving(tmp_path, making) as server:
        port = server.server_port
        with pytest.raises(ConfigurationError) as caught:
            Server(Watched(str(tmp_path)), port)
    assert str(caught.value) == (
        f"--port {port} is not available on 127.0.0.1: Address already in use. Pass another one, "
        "or leave it out for a free one."
    )


def test_without_a_port_any_free_one_serves_where_the_usual_one_is_taken(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(Watched(str(tmp_path)))) for _ in range(2)]
    ports = [server.server_port for server in servers]
    assert len(set(ports)) == 2
    # Somebody else may have the usual one.
    assert ports[1] != PORT


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_is_none_is_refused(port, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(tmp_path), "--port", str(port)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"ipufit watch: --port must be 0, for a free port, or at most 65535, got {port}.\n"
    )


def test_a_file_can_not_be_watched(tmp_path, capsys):
    file = tmp_path / "run"
    file.write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["watch", str(file)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"ipufit watch: watch shows the folder of a report, but {str(file)!r} is a file. Pass "
        "the folder of ipufit.Report.\n"
    )


def test_the_page_is_asked_to_be_live(tmp_path, monkeypatch):
    fake = types.ModuleType("ipufit.report.page")
    fake.render_page = lambda runs, live: f"{len(runs)} {live}"
    fake.render_state = lambda run: run.facts["status"]
    monkeypatch.setitem(sys.modules, "ipufit.report.page", fake)
    watched = Watched(str(written(tmp_path / "run")))
    assert (watched.page(), watched.state()) == (b"1 True", b"finished")


@pytest.mark.long
def test_ctrl_c_ends_the_command_cleanly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "ipufit", "watch", str(tmp_path / "run"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=str(ROOT),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        line = process.stdout.readline()
        address, _, rest = line.partition(" ")
        assert rest == f"shows {tmp_path / 'run'}; press Ctrl-C to stop.\n"
        with pytest.raises(urllib.request.HTTPError) as waiting:
            urllib.request.urlopen(address, timeout=10)
        assert waiting.value.code == 503
        waiting.value.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, out, err) == (0, "\n", "")
