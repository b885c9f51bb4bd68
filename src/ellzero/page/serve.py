"""The page of a run, served on this machine while the run goes on.

It listens on the loopback address only and knows two addresses: the page, and what has changed in it since. It reads
the folder and nothing else, and hands out no file.
"""

from __future__ import annotations

import html
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

from ellzero.experiments.store import checkpoint
from ellzero.experiments.store.folder import Folder, FolderError
from ellzero.page.facts import LATENCY, look_at
from ellzero.page.looking import Look
from ellzero.page.run import run_content, run_page

LOOPBACK = "127.0.0.1"
_WATCHED = ("run.json", "history.jsonl", "results.json", "compact.safetensors", LATENCY)


@final
class Server(ThreadingHTTPServer):
    """Serves the page of one run, once `serve_forever()` is called.

    Args:
        folder: of the run, finished or not.
        index: which run of a stack, from 0.
        port: to listen on; 0 for any that is free.

    Raises:
        IndexError: there is no such run.
        OSError: the port is taken, or may not be used.
    """

    daemon_threads = True

    def __init__(self, folder: Folder, index: int = 0, port: int = 0) -> None:
        if not 0 <= index < len(folder.recipes):
            raise IndexError(f"`index` must be from 0 to {len(folder.recipes) - 1}, got {index}")
        super().__init__((LOOPBACK, port), _Handler)
        self.folder, self.index = folder, index
        self._lock = threading.Lock()
        self._seen: tuple[int | None, Look | None] = (None, None)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def version(self) -> str:
        """Changes whenever something in the folder has changed that the page shows."""
        parts = []
        for name in _WATCHED:
            try:
                found = (self.folder.path / name).stat()
                parts.append(f"{found.st_size}.{found.st_mtime_ns}")
            except OSError:
                parts.append("none")
        return "-".join([*parts, str(self._step())])

    def _step(self) -> int | None:
        with suppress(OSError):
            return next(reversed(checkpoint.steps(self.folder.checkpoints)), None)
        return None

    def _look(self) -> Look | None:
        """What the network looks like; it is taken from the disk again when there is a new checkpoint."""
        step = self._step()
        if step is not None and step != self._seen[0]:
            self._seen = (step, look_at(self.folder, self.index)[0])
        return self._seen[1]

    def page(self) -> str:
        """The page as it is now."""
        with self._lock:
            return run_page(self.folder, self.index, seen=self._look(), live=True)

    def content(self) -> str:
        """What changes in it, as it is now."""
        with self._lock:
            return run_content(self.folder, self.index, seen=self._look())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away in the middle is none of our business, and the log is the user's terminal."""


@final
class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "ellzero", ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            # A page from elsewhere can make its own name point here; then the browser sends that name.
            self._send(HTTPStatus.FORBIDDEN, "This server answers on its own address only.\n", body, kind="text/plain")
            return
        asked = urlsplit(self.path)
        version = self.server.version()  # before the files are read: what comes later is news again
        try:
            if asked.path == "/":
                self._send(HTTPStatus.OK, self.server.page(), body, version)
            elif asked.path == "/content" and parse_qs(asked.query).get("since") == [version]:
                self._send(HTTPStatus.NO_CONTENT, "", body, version)
            elif asked.path == "/content":
                self._send(HTTPStatus.OK, self.server.content(), body, version)
            else:
                self._send(HTTPStatus.NOT_FOUND, "There is nothing here.\n", body, kind="text/plain")
        except FolderError as error:
            said = f'<p class="warning" id="state">{html.escape(str(error))}</p>'
            self._send(HTTPStatus.OK, said, body, version)

    def _send(
        self, status: HTTPStatus, text: str, body: bool, version: str | None = None, kind: str = "text/html"
    ) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if version is not None:
            self.send_header("X-Version", version)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: standard output and error belong to the command."""
