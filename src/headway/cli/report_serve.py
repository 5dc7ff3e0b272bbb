"""`headway report RUN --serve`: the page of a run while it goes on, on this machine alone.

The server listens on 127.0.0.1, answers GET and HEAD of `/` and writes nothing. It refuses a request whose Host header
names another machine: a page of anyone could otherwise point a name of its own at 127.0.0.1 and read the answer
(DNS rebinding).
"""

import math
import os
import re
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headway.cli.report_page import read_run, report_page
from headway.errors import ConfigError, HeadwayError
from headway.explain.records import METRICS
from headway.report.format import printable
from headway.report.page import CHART_STYLE, html_page, safe

PORT = 8484  # the same every time, for a tunnel or a bookmark
REFRESH_S = 5
_HOST = "127.0.0.1"
_WORK_SHARE = 0.1  # of the time goes to making pages at most: the run itself may train on this machine
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
    timeout = 30  # of a connection that sends nothing [s]

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

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server gives it
        """Say nothing: a line every few seconds would hide what else the terminal shows."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a reader that left before its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
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
    if named := [name for name, is_given in refused.items() if is_given]:
        raise ConfigError(
            f"--serve and {named[0]} are given: --serve shows the HTML page of one run, and writes none. Leave one of "
            "them out."
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
        print(f"{address} shows {printable(str(path))}; Ctrl-C ends it", flush=True)
        if open_it:
            webbrowser.open(address)
        server.serve_forever(poll_interval=0.1)


def _page(path: Path) -> bytes:
    """The page of `headway report`, or while that cannot be made one that says why."""
    try:
        return report_page(read_run(path)).encode()
    except (HeadwayError, OSError) as error:
        name = path.resolve().name
        waited_for = path / METRICS if path.is_dir() else path
        body = (
            f'<h1>{safe(name)}</h1>\n<p class="verdict">Waiting: no page can be made of {safe(str(waited_for))} yet. '
            "This page looks again every few seconds.</p>\n"
            f'<p class="note">{safe(str(error))}</p>'
        )
        return html_page(f"{name}: headway report", CHART_STYLE, body).encode()


def _stamps(path: Path) -> _Stamps:
    """Name, size [bytes] and time of change [ns] of the files that a page may be made of."""
    found = []
    try:
        with os.scandir(path if path.is_dir() else path.parent) as entries:
            for entry in entries:
                if entry.is_file():
                    seen = entry.stat()
                    found.append((entry.name, seen.st_size, seen.st_mtime_ns))
    except OSError:  # removed as it was looked at: the next look finds what is there then
        return ()
    return tuple(sorted(found))
