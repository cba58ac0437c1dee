"""HTTP server that shows the page of a run that goes on to browsers on this machine."""

from __future__ import annotations

import html
import http.server
import json
import os
import socket
import socketserver
import sys
import threading
import traceback
from typing import Callable, Dict, Optional, Tuple, Union

from ipufit.errors import ConfigurationError, IpufitError
from ipufit.report.run import EXECUTIONS, FACTS, Run

# Nothing but this machine can reach it.
ADDRESS = "127.0.0.1"
PORT = 6010
_MOST_PORT = 65_535

# What any answer may do, whatever it says of itself: nothing of it comes from elsewhere.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_HTML, _JSON, _TEXT = "text/html", "application/json", "text/plain"

_Request = Union[socket.socket, Tuple[bytes, socket.socket]]
_Stamp = Tuple[Optional[Tuple[int, int, int]], ...]


class _NotYetError(Exception):
    """Raised while there is no page to show; the text says why."""


class Watched:
    """Pages and news of a report's folder, made anew when its files have changed.

    Another process writes them at the same time: ``run.json`` is replaced as a whole, and of the
    table of executions an unfinished last row is not read.

    Args:
        folder: of the report, which may not be there yet.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._cache: Dict[Callable[[Run], str], Tuple[_Stamp, bytes]] = {}
        self._lock = threading.Lock()

    def page(self) -> bytes:
        """Return the page, which asks for :meth:`state` from then on.

        Raises:
            NotYetError: there is nothing to show.
        """
        return self._fresh(_page)

    def state(self) -> bytes:
        """Return the JSON that brings an open page up to date.

        Raises:
            NotYetError: there is nothing to show.
        """
        return self._fresh(_state)

    def _fresh(self, render: Callable[[Run], str]) -> bytes:
        # One at a time: a second one finds what the first one has made.
        with self._lock:
            # Looked at before the files are read, so that no later change is missed.
            stamp = tuple(_stamp_of(os.path.join(self.folder, f)) for f in (FACTS, EXECUTIONS))
            if self._cache.get(render, (None, b""))[0] != stamp:
                self._cache[render] = (stamp, render(self._run()).encode("utf-8"))
            return self._cache[render][1]

    def _run(self) -> Run:
        if not os.path.exists(os.path.join(self.folder, FACTS)):
            raise _NotYetError(
                f"Waiting for a run: {self.folder} contains no report yet. A report begins with "
                f"fit(callbacks=[ipufit.Report({self.folder!r})])."
            )
        try:
            return Run.read(self.folder)
        except (IpufitError, OSError) as error:
            raise _NotYetError(str(error)) from error


def _stamp_of(path: str) -> Optional[Tuple[int, int, int]]:
    """Return a value that differs after any change of a file; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _page(run: Run) -> str:
    from ipufit.report.page import render_page

    return render_page([run], live=True)


def _state(run: Run) -> str:
    from ipufit.report.page import render_state

    return render_state(run)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves one folder to this machine.

    Args:
        watched: the folder.
        port: to listen at; None is :data:`PORT`, or any free one where that is taken.

    Raises:
        ConfigurationError: the port can't be had.
    """

    daemon_threads = True
    # Where this would let two programs have one port, it must not be asked for.
    allow_reuse_address = os.name == "posix"

    def __init__(self, watched: Watched, port: Optional[int] = None) -> None:
        self.watched = watched
        if port is not None and not 0 <= port <= _MOST_PORT:
            raise ConfigurationError(
                f"--port must be 0, for a free port, or at most {_MOST_PORT}, got {port}."
            )
        try:
            super().__init__((ADDRESS, PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                raise ConfigurationError(
                    f"--port {port} is not available on {ADDRESS}: {error.strerror}. Pass another "
                    "one, or leave it out for a free one."
                ) from error
            super().__init__((ADDRESS, 0), _Handler)

    def server_bind(self) -> None:
        """Take the port, without asking anybody for the name of this machine."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, int(self.server_address[1])

    def handle_error(self, request: _Request, client_address: object) -> None:
        """Say what went wrong, unless a browser has gone away before its answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address that a browser opens."""
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> Tuple[str, ...]:
        """Host headers of browsers that were given the address of this server."""
        names = (ADDRESS, "localhost")
        ports = (f":{self.server_port}", *([""] if self.server_port == 80 else []))
        return tuple(f"{name}{port}" for name in names for port in ports)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request of a browser that watches the report."""

    server: Server
    server_version, sys_version = "ipufit", ""
    # Seconds for a browser to say what it wants.
    timeout = 10

    def do_GET(self) -> None:
        """Answer with the page or its news, to requests for this host alone."""
        # A page of another site whose name was made to lead here says that name.
        if (self.headers.get("Host") or "").lower() not in self.server.hosts:
            self._answer(403, _TEXT, f"Open {self.server.url} instead.\n".encode("ascii"))
            return
        routes = {
            "/": (_HTML, self.server.watched.page),
            "/state": (_JSON, self.server.watched.state),
        }
        path = self.path.partition("?")[0]
        if path not in routes:
            self._answer(404, _TEXT, b"There is / and /state.\n")
            return
        kind, make = routes[path]
        try:
            body = make()
        except _NotYetError as reason:
            text = str(reason)
            missing = json.dumps({"missing": text}).encode("ascii")
            self._answer(503, kind, _waiting(text) if kind == _HTML else missing)
        except Exception as error:
            # Whoever reads the terminal can tell us where it was.
            traceback.print_exc()
            text = f"The page can't be made: {type(error).__name__}: {error}"
            self._answer(500, _TEXT, f"{text}\n".encode("utf-8", "replace"))
        else:
            self._answer(200, kind, body)

    do_HEAD = do_GET  # noqa: N815

    def _refuse(self) -> None:
        self._answer(405, _TEXT, b"Only GET and HEAD.\n", Allow="GET, HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse  # noqa: N815

    def send_error(
        self, code: int, message: Optional[str] = None, explain: Optional[str] = None
    ) -> None:
        """Refuse a request that no browser makes."""
        self.close_connection = True
        self._answer(code, _TEXT, b"Only GET and HEAD.\n")

    def _answer(self, status: int, kind: str, body: bytes, **more: str) -> None:
        self.send_response(status)
        about = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        if status == 503:
            about["Retry-After"] = "2"
        for name, value in {**about, **_HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to whoever reads the address."""


def _waiting(text: str) -> bytes:
    """Render the page that waits for a run; it asks again by itself."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="refresh" content="2"><title>Waiting for a run</title></head>'
        f"<body><p>{html.escape(text)}</p></body></html>\n"
    ).encode("utf-8", "replace")
