"""The values of every epoch for a server."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from typing import Dict, Mapping, Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import finite, one_of
from ipufit.callbacks.records import as_json
from ipufit.errors import ConfigurationError
from ipufit.utils.console import warn_user

__all__ = ["RemoteMonitor"]


class RemoteMonitor(Callback):
    """Sends a POST request with the epoch's index and values.

    A server that does not answer, or refuses, is warned of; training goes on.

    Args:
        root: address of the server, "http://..." or "https://...".
        path: where to send to.
        field: name of the form's field that holds the JSON.
        headers: further headers.
        send_as_json: send the JSON itself instead of a form.
        timeout: seconds to wait for an answer.

    Raises:
        ConfigurationError: an argument can't work.
    """

    adds: Tuple[str, ...] = ()

    def __init__(
        self,
        root: str = "http://localhost:9000",
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Optional[Mapping[str, str]] = None,
        send_as_json: bool = False,
        timeout: float = 10.0,
    ) -> None:
        super().__init__()
        if not isinstance(root, str) or not root.startswith(("http://", "https://")):
            raise ConfigurationError(
                "root of RemoteMonitor must be an address that starts with http:// or https://, "
                f"got {root!r}. Write for example 'http://localhost:9000'."
            )
        self.root = root
        self.path = path
        self.field = field
        self.headers: Dict[str, str] = dict(headers or {})
        self.send_as_json: bool = one_of(self, "send_as_json", send_as_json, (True, False))
        self.timeout: float = finite(self, "timeout", timeout, 0.0)

    @property
    def only_reports(self) -> bool:
        """True, so that of several processes the first one alone sends."""
        return True

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Send the epoch's values, and warn where that fails."""
        text = as_json({"epoch": epoch, **(logs or {})})
        headers: Dict[str, str] = {}
        if self.send_as_json:
            headers["Content-Type"] = "application/json"
        else:
            text = urllib.parse.urlencode({self.field: text})
        request = urllib.request.Request(
            self.root + self.path, text.encode(), {**headers, **self.headers}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout):
                pass
        except (urllib.error.URLError, OSError) as error:
            warn_user(
                f"RemoteMonitor could not send epoch {epoch} to {self.root}: {error}. Training "
                "goes on.",
            )
