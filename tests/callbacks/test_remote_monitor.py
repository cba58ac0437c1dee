"""RemoteMonitor: what arrives at the server, and what happens without one."""

import contextlib
import http.server
import json
import threading
import urllib.parse

import pytest

from ipufit.callbacks import RemoteMonitor
from tests.faulty import batches, compiled, fit
from tests.told import Gives, refused


@contextlib.contextmanager
def server(status=200):
    """Remembers requests: path, headers and body."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            requests.append((self.path, dict(self.headers), body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}", requests
        finally:
            found.shutdown()
            thread.join()


@pytest.mark.long("ipu-standin")
def test_a_form_arrives_after_every_epoch():
    """As Keras sends it."""
    with server() as (root, requests):
        callbacks = [Gives(mine=[float("nan"), 2.0]), RemoteMonitor(root)]
        history = fit(compiled(), batches(1), epochs=2, callbacks=callbacks).history
    assert [path for path, _, _ in requests] == ["/publish/epoch/end/"] * 2
    forms = [urllib.parse.parse_qs(body) for _, _, body in requests]
    assert [list(form) for form in forms] == [["data"]] * 2
    assert [json.loads(form["data"][0]) for form in forms] == [
        {"epoch": 0, "loss": history["loss"][0], "mine": "NaN"},
        {"epoch": 1, "loss": history["loss"][1], "mine": 2.0},
    ]


@pytest.mark.long
def test_the_options():
    """Another place, another field, headers, and JSON itself."""
    with server() as (root, requests):
        fit(compiled(), batches(1), callbacks=[RemoteMonitor(root, "/a", "f", {"X-Token": "t"})])
        fit(compiled(), batches(1), callbacks=[RemoteMonitor(root, send_as_json=True)])
    path, headers, body = requests[0]
    assert (path, headers["X-Token"], list(urllib.parse.parse_qs(body))) == ("/a", "t", ["f"])
    path, headers, body = requests[1]
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["epoch"] == 0


@pytest.mark.long("ipu-standin")
def test_training_goes_on_without_a_server():
    """A monitor is no reason to lose a training."""
    with server() as (root, _):
        pass
    callback = RemoteMonitor(root, timeout=1)
    with pytest.warns(UserWarning, match="RemoteMonitor could not send epoch") as caught:
        assert fit(compiled(), batches(1), epochs=2, callbacks=[callback]).epoch == [0, 1]
    assert len(caught) == 2
    assert str(caught[1].message).startswith(f"RemoteMonitor could not send epoch 2 to {root}: ")
    with server(status=500) as (root, _), pytest.warns(UserWarning, match="500"):
        fit(compiled(), batches(1), callbacks=[RemoteMonitor(root)])


def test_a_wrong_argument_is_named():
    """When it is made."""
    refused(
        lambda: RemoteMonitor("localhost:9000"),
        "root of RemoteMonitor must be an address that starts with http:// or https://, got "
        "'localhost:9000'. Write for example 'http://localhost:9000'.",
    )
    refused(
        lambda: RemoteMonitor(send_as_json=1),
        "send_as_json of RemoteMonitor must be True or False, got 1.",
    )
    refused(
        lambda: RemoteMonitor(timeout=-1),
        "timeout of RemoteMonitor must be a finite number of at least 0.0, got -1.",
    )
