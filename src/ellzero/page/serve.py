"""The page of a run, served on this machine while the run goes on.

It listens on the loopback address only and knows two addresses: the page, and what has changed in it since. It reads
the folder and nothing else, and hands out no file. The page is made once for each state of the folder.
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
from ellzero.page.facts import LATENCY, Look, look_at
from ellzero.page.run import run_page

LOOPBACK = "127.0.0.1"
_WATCHED = ("run.json", "history.jsonl", "results.json", "compact.safetensors", LATENCY)
_THREADS, _SECONDS = 128, 5.0  # readers at a time, and how long one may say nothing
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@final
class Server(ThreadingHTTPServer):
    """Serves the page of one run, finished or not, once `serve_forever()` is called.

    `index` says which run of a stack, or IndexError; `port` is where it listens, 0 for any that is free, or OSError.
    """

    daemon_threads = True
    request_queue_size = _THREADS

    def __init__(self, folder: Folder, index: int = 0, port: int = 0) -> None:
        if not 0 <= index < len(folder.recipes):
            raise IndexError(f"`index` must be from 0 to {len(folder.recipes) - 1}, got {index}")
        super().__init__((LOOPBACK, port), _Handler)
        self.folder, self.index = folder, index
        self._lock = threading.Lock()
        self._seen: tuple[int | None, Look | None] = (None, None)
        self._made: dict[bool, tuple[str, str]] = {}  # the version and the text of the whole page, and of the part
        self._free = threading.BoundedSemaphore(_THREADS)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def version(self) -> str:
        """Changes whenever something in the folder has changed that the page shows."""
        parts = [str(self._step())]
        for name in _WATCHED:
            with suppress(OSError):
                found = (self.folder.path / name).stat()
                parts.append(f"{name}.{found.st_size}.{found.st_mtime_ns}")
        return "-".join(parts)

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

    def page(self, part: bool = False) -> str:
        """The page as it is now, or what changes in it."""
        with self._lock:
            version = self.version()
            if self._made.get(part, ("",))[0] != version:
                text = run_page(self.folder, self.index, seen=self._look(), live=True, part=part)
                self._made[part] = version, text
            return self._made[part][1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Waits for a free thread: more readers than that wait in the system's queue."""
        self._free.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away in the middle is none of our business, and the log is the user's terminal."""


@final
class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "ellzero", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        status, text, version = self._answer()
        data, kind = text.encode(), "text/html" if status == HTTPStatus.OK else "text/plain"
        self.send_response(status)
        if version:
            self.send_header("X-Version", version)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _answer(self) -> tuple[HTTPStatus, str, str]:
        """Status, text, and the version of what it is about."""
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{LOOPBACK}:{port}", f"localhost:{port}"):
            # A page from elsewhere can make its own name point here; then the browser sends that name.
            return HTTPStatus.FORBIDDEN, "This server answers on its own address only.\n", ""
        asked = urlsplit(self.path)
        version = self.server.version()  # before the files are read: what comes later is news again
        if asked.path not in ("/", "/content"):
            return HTTPStatus.NOT_FOUND, "There is nothing here.\n", ""
        if asked.path == "/content" and parse_qs(asked.query).get("since") == [version]:
            return HTTPStatus.NO_CONTENT, "", version
        try:
            return HTTPStatus.OK, self.server.page(part=asked.path == "/content"), version
        except FolderError as error:
            return HTTPStatus.OK, f'<p class="warning" id="state">{html.escape(str(error))}</p>', version

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: standard output and error belong to the command."""
