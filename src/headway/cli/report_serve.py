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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headway.cli.output import say
from headway.errors import ConfigError, HeadwayError
from headway.log.run_files import METRICS
from headway.pages.page import report_page
from headway.pages.run import read_run
from headway.report.page import render

PORT = 8484  # the same every time, for a tunnel or a bookmark
REFRESH_S = 5
_HOST = "127.0.0.1"
_WORK_SHARE = 0.1  # largest share of the time for making pages: the run itself may train on this machine
_OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]{1,5})?", flags=re.IGNORECASE)


class LivePage:
    """The page of a run, made anew only after a file of the run has changed.

    Args:
        path: a run folder, or a file of a meter's records.
        clock: seconds from any beginning.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()  # one page at a time is made, whoever asks
        self._stamps: list[tuple[str, int, int]] | None = None
        self._page, self._rest_until_s, self._refresh_s = b"", -math.inf, REFRESH_S

    def now(self) -> tuple[bytes, int]:
        """The page as UTF-8, and when to ask for it again [s].

        A page that took long to make is kept for nine times as long, even if the records have grown meanwhile.
        """
        with self._lock:
            stamps, began_s = _stamps(self._path), self._clock()
            if stamps != self._stamps and began_s >= self._rest_until_s:
                self._page, self._stamps = _page(self._path), stamps
                period_s = (self._clock() - began_s) / _WORK_SHARE
                self._rest_until_s = began_s + period_s
                self._refresh_s = max(REFRESH_S, math.ceil(period_s))
            return self._page, self._refresh_s


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "headway", ""
    timeout = 5  # longest wait for a reader that sends no request, or takes no answer [s]

    def __init__(self, live: LivePage, *arguments: Any) -> None:
        self._live = live
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Send the page."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _OWN_NAMES.fullmatch(hosts[0].strip()):
            self.send_error(403, explain="Ask for localhost or 127.0.0.1. This server has no other name.")
        elif self.path != "/":
            self.send_error(404, explain="There is one page, at /.")
        else:
            page, refresh_s = self._live.now()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Refresh", str(refresh_s))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page)

    def _refuse_method(self) -> None:
        self.send_error(405, explain="This server only shows pages. Use GET or HEAD.")

    do_HEAD = do_GET
    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def end_headers(self) -> None:
        """Add the headers of every answer, an error's included."""
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def send_error(self, code: int, _message: str | None = None, explain: str | None = None) -> None:
        """Answer with an error in the words of its code alone: http.server's own message repeats what was asked."""
        super().send_error(code, None, explain)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server gives it
        """Say nothing: a line every few seconds would hide other output of the terminal."""


class _Server(ThreadingHTTPServer):
    """Answers each connection with a thread; one that is silent is closed after a few seconds."""

    request_queue_size = 512  # readers that connect at once; the system may allow fewer

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
            f"--serve and {options[0]} are given, but --serve shows the HTML page of one run and writes no file. "
            "Leave one of them out."
        )
    (path,) = runs
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Give the folder of a run, or its file of records, to --serve.")
    wanted = PORT if port is None else port
    try:
        server = _Server((_HOST, wanted), partial(_Handler, LivePage(path)))
    except OSError as error:
        raise ConfigError(
            f"--port {wanted} of {_HOST} cannot be used: {error.strerror or error}. Give another port, or --port 0 "
            "for any free one."
        ) from error
    with server:
        address = f"http://{_HOST}:{server.server_port}/"
        say(f"{address} shows {path}; Ctrl-C ends it", flush=True)
        if open_it:
            webbrowser.open(address)
        server.serve_forever(poll_interval=0.02)


def _page(path: Path) -> bytes:
    """The page of `headway report`, or while that cannot be made one that says why."""
    try:
        return report_page(read_run(path)).encode()
    except (HeadwayError, OSError) as error:
        waited_for = path / METRICS if path.is_dir() else path
        page = render("waiting.html.jinja", name=path.resolve().name, path=str(waited_for), error=str(error))
        return page.encode()


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, size [bytes] and time of change [ns] of the files that a page may be made of."""
    try:
        with os.scandir(path if path.is_dir() else path.parent) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:  # removed as it was looked at: the next look finds what is there then
        return []
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in files)
