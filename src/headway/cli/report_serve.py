"""`headway report RUN --serve`: the page of a run while it goes on, on this machine alone.

The server listens on 127.0.0.1, answers GET and HEAD of `/` and writes nothing. It refuses a request whose Host header
names another machine: a page of anyone could otherwise point a name of its own at 127.0.0.1 and read the answer
(DNS rebinding).
"""

import math
import os
import re
import selectors
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast

from headway.cli.output import say
from headway.errors import ConfigError, HeadwayError
from headway.log.run_files import METRICS
from headway.pages.run import read_run, report_page
from headway.report.page import render

PORT = 8484  # the same every time, for a tunnel or a bookmark
REFRESH_S = 5
_HOST = "127.0.0.1"
_WORK_SHARE = 0.1  # of the time goes to making pages at most: the run itself may train on this machine
_THREADS = 8
_MOST_OPEN = 600  # connections; below the usual limit of 1024 files
_REQUEST_S = 30  # for a connection to send its request [s]
_LONGEST_HEAD = 1 << 16  # of a request [bytes]; what is longer is refused
_POLL_S = 0.02
_OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?", flags=re.IGNORECASE)
_Stamps = tuple[tuple[str, int, int], ...]


class LivePage:
    """The page of a run, made anew only after a file of the run has changed.

    Args:
        path: a run folder, or a file of a meter's records.
        clock: seconds from any beginning.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()  # one page at a time is made, whoever asks
        self._stamps: _Stamps | None = None
        self._page, self._rest_until_s, self._refresh_s = b"", -math.inf, REFRESH_S

    def now(self) -> tuple[bytes, int]:
        """The page as UTF-8, and when to ask for it again [s].

        A page that took long to make is kept for nine times as long, even if the records have grown meanwhile.
        """
        with self._lock:
            stamps = _stamps(self._path)
            began_s = self._clock()
            if stamps != self._stamps and began_s >= self._rest_until_s:
                self._page, self._stamps = _page(self._path), stamps
                ended_s = self._clock()
                period_s = (ended_s - began_s) / _WORK_SHARE
                self._rest_until_s = began_s + period_s
                self._refresh_s = max(REFRESH_S, math.ceil(period_s))
            return self._page, self._refresh_s


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server_version, sys_version = "headway", ""
    timeout = 5  # of a reader that takes nothing of its answer [s]

    def __init__(self, live: LivePage, *arguments: Any) -> None:
        self._live = live
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _OWN_NAMES.fullmatch(hosts[0].strip()):
            self.send_error(
                HTTPStatus.FORBIDDEN, explain="Ask for localhost or 127.0.0.1; this server has no other name."
            )
        elif self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND, explain="There is one page, at /.")
        else:
            page, refresh_s = self._live.now()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Refresh", str(refresh_s))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page)

    def _refuse_method(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, explain="This server only shows: GET and HEAD.")

    do_HEAD = do_GET
    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def end_headers(self) -> None:
        """Add what every answer says, of errors too."""
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def send_error(self, code: int, _message: str | None = None, explain: str | None = None) -> None:
        """Answer with an error in the words of its code alone: http.server's own message repeats what was asked."""
        super().send_error(code, None, explain)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server gives it
        """Say nothing: a line every few seconds would hide what else the terminal shows."""


class _Server(HTTPServer):
    """Answers with a few threads, however many connect: a connection has one only once its request is there whole.

    Until then it waits in a selector, for so long at most; where too many are open, the one that has waited longest
    is closed.
    """

    request_queue_size = 512  # readers that connect at once; the system may allow fewer

    def __init__(self, address: tuple[str, int], handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="report")
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, tuple[Any, float]] = {}  # address and deadline [s], oldest first
        self._answered = 0  # connections that have a thread, or wait for one
        self._lock = threading.Lock()
        super().__init__(address, handler)  # last: it closes what is here if the port cannot be used

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection in, and wait for its request."""
        if len(self._waiting) + self._answered >= _MOST_OPEN:
            if not self._waiting:
                self.shutdown_request(request)
                return
            self._drop(next(iter(self._waiting)))
        self._selector.register(request, selectors.EVENT_READ)
        self._waiting[request] = client_address, time.monotonic() + _REQUEST_S

    def service_actions(self) -> None:
        """Hand over the requests that have arrived, and close connections that send none; called at every poll."""
        for key, _ in self._selector.select(0):
            connection = cast("socket.socket", key.fileobj)
            try:
                head = connection.recv(_LONGEST_HEAD, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:
                head = b""
            if not head:
                self._drop(connection)
            elif b"\r\n\r\n" in head or len(head) == _LONGEST_HEAD:
                self._selector.unregister(connection)
                address, _ = self._waiting.pop(connection)
                with self._lock:
                    self._answered += 1
                self._threads.submit(self._answer, connection, address)
        now_s = time.monotonic()
        for connection in [waiting for waiting, (_, deadline_s) in self._waiting.items() if deadline_s < now_s]:
            self._drop(connection)

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - as socketserver does, which says it on stderr
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            with self._lock:
                self._answered -= 1

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]
        self.shutdown_request(connection)

    def server_close(self) -> None:
        """Let go of the port and of all connections."""
        super().server_close()
        for connection in list(self._waiting):
            self._drop(connection)
        self._selector.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that left before its answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def serve(runs: list[Path], port: int | None, *, output: Path | None, markdown: bool, open_it: bool) -> None:
    """Show a run at an address of this machine until Ctrl-C.

    Args:
        runs: one run folder, or file of a meter's records, that is there.
        port: 0 for any free one; PORT if None.
        output: of the command, refused.
        markdown: of the command, refused.
        open_it: whether to show the page in the browser.

    Raises:
        ConfigError: an option contradicts --serve, there is no such run, or the port cannot be used.
        KeyboardInterrupt: Ctrl-C.
    """
    refused = {"-o": output is not None, "--md": markdown, f"{len(runs)} runs": len(runs) != 1}
    if options := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(
            f"--serve and {options[0]} are given: --serve shows the HTML page of one run, and writes none. Leave one "
            "of them out."
        )
    (path,) = runs
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Give the folder of a run, or its file of records, to --serve.")
    wanted = PORT if port is None else port
    try:
        server = _Server((_HOST, wanted), partial(_Handler, LivePage(path)))
    except OSError as error:
        raise ConfigError(
            f"--port {wanted} of {_HOST} cannot be used: {error.strerror or error}. Give another, or --port 0 for any "
            "free one."
        ) from error
    with server:
        address = f"http://{_HOST}:{server.server_port}/"
        say(f"{address} shows {path}; Ctrl-C ends it", flush=True)
        if open_it:
            webbrowser.open(address)
        server.serve_forever(poll_interval=_POLL_S)


def _page(path: Path) -> bytes:
    """The page of `headway report`, or while that cannot be made one that says why."""
    try:
        return report_page(read_run(path)).encode()
    except (HeadwayError, OSError) as error:
        waited_for = path / METRICS if path.is_dir() else path
        page = render("waiting.html.jinja", name=path.resolve().name, path=str(waited_for), error=str(error))
        return page.encode()


def _stamps(path: Path) -> _Stamps:
    """Name, size [bytes] and time of change [ns] of the files that a page may be made of."""
    stamps = []
    try:
        with os.scandir(path if path.is_dir() else path.parent) as entries:
            for entry in entries:
                if entry.is_file():
                    status = entry.stat()
                    stamps.append((entry.name, status.st_size, status.st_mtime_ns))
    except OSError:  # removed as it was looked at: the next look finds what is there then
        return ()
    return tuple(sorted(stamps))
