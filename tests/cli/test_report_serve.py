import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from headway.cli.report_serve import REFRESH_S, LivePage
from headway.pages.page import report_page
from headway.pages.run import read_run
from helpers.pages import Browser
from helpers.processes import PYTHONPATH, running

LIMIT_S = 60  # a test that waits so long has failed


def record(step):
    """A step's record of half a second, as a meter writes it, with loss 3 / step."""
    return json.dumps({"step": step, "step_s": 0.5, "tokens": 100, "loss": 3.0 / step}) + "\n"


def write_run(folder, num_steps):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(map(record, range(1, num_steps + 1))))
    return folder


def append(folder, *steps):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(map(record, steps)))


def command(*arguments):
    return [sys.executable, "-m", "headway", "report", *map(str, arguments)]


@contextmanager
def served(run):
    """A process that serves a run: itself and the port that its line names."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    serve = command(run, "--serve", "--port", 0)
    with running(serve, env={**os.environ, "PYTHONPATH": PYTHONPATH}, text=True, **pipes) as process:
        line = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/ shows ", line)
        assert found, line or process.communicate(timeout=LIMIT_S)
        yield process, int(found[1])


def ask(port, method="GET", path="/", host=None):
    """Status, headers and body of an answer; host is the Host header, "" for none, the true one by default."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.putrequest(method, path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def ask_until(port, said):
    """The first page that says something, of a run that was written to."""
    deadline_s = time.monotonic() + LIMIT_S
    while said not in (body := ask(port)[2].decode()):
        assert time.monotonic() < deadline_s, f"{said!r} is not on {body}"
        time.sleep(0.05)
    return body


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run", 5)


@pytest.fixture(scope="module")
def port(run):
    """The port of a run that nobody writes to, for the tests that only ask."""
    with served(run) as (_, port):
        yield port


def test_the_page_is_that_of_the_file_and_asks_for_itself_again(run, port):
    status, headers, body = ask(port)
    assert (status, body) == (200, report_page(read_run(run)).encode())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert int(headers["Refresh"]) >= REFRESH_S
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_head_has_the_headers_alone(port):
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as reader, reader.makefile("rb") as answer:
        reader.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = answer.read().partition(b"\r\n\r\n")
    assert (head.split()[1], body) == (b"200", b"")
    assert f"Content-Length: {len(ask(port)[2])}".encode() in head


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:9999"])
def test_names_of_this_machine_are_answered(port, host):
    assert ask(port, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8484",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "x@localhost",
        "",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_another_name_is_refused(port, host, method):
    status, headers, body = ask(port, method, host=host)
    assert status == 403
    assert headers["Cache-Control"] == "no-store"
    assert b"headway-report" not in body


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/..", "/../run/metrics.jsonl", "/?x=1", "/index.html", "/%2e%2e", "http://127.0.0.1/"]
)
def test_there_is_one_page(port, path):
    status, _, body = ask(port, path=path)
    assert status == 404
    assert b"step_s" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(port, method):
    status, headers, _ = ask(port, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "words", ["<b>x</b> / HTTP/1.0", "GET /<b>x</b> HTTP/1.0", "GET / HTTP/<b>x</b>", "GET / <b>x</b> y z"]
)
def test_an_error_repeats_nothing_that_was_asked(port, words):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as reader:
        reader.sendall(f"{words}\r\nHost: localhost\r\n\r\n".encode())
        answer = b"".join(iter(lambda: reader.recv(65536), b""))
    assert answer
    assert b"<b>" not in answer


def test_it_listens_on_the_loopback_address_alone(port):
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", port))  # this machine too, by another address


def test_records_that_are_appended_are_shown_and_an_interrupt_ends_it(tmp_path):
    run = write_run(tmp_path / "run", 3)
    with served(run) as (process, port):
        assert "1 to 3, 3 records" in ask(port)[2].decode()
        append(run, 4, 5)
        page = ask_until(port, "1 to 5, 5 records")
        assert page == report_page(read_run(run))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130  # as of every command (headway/cli/app.py)
        assert (out, "Traceback" in err) == ("", False)
        with pytest.raises(ConnectionRefusedError):
            ask(port)


def test_a_run_without_records_waits_and_shows_the_first(tmp_path):
    run = tmp_path / "run<img src=x>"
    run.mkdir()
    with served(run) as (_, port):
        status, headers, body = ask(port)
        assert status == 200
        assert int(headers["Refresh"]) >= REFRESH_S
        assert b"Waiting: no page can be made of" in body
        assert b"default-src 'none'" in body
        assert b"<img" not in body
        (run / "metrics.jsonl").write_text('{"kind": "evaluation", "step": 0, "loss": 3.0}\n{"step": 1, "st')
        ask_until(port, "holds no record of a step")
        (run / "metrics.jsonl").write_text(record(1))
        ask_until(port, "1 to 1, 1 records")


def test_a_page_is_made_anew_only_after_a_file_of_the_run_changed(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("headway.cli.report_serve._page", lambda path: made.append(path) or b"page %d" % len(made))
    run = write_run(tmp_path / "run", 3)
    live = LivePage(run, clock=lambda: 0.0)
    assert live.now() == live.now() == (b"page 1", REFRESH_S)
    append(run, 4)
    assert live.now() == live.now() == (b"page 2", REFRESH_S)
    (run / "summary.json").write_text("{}\n")  # the run has ended, which the page says
    assert live.now() == live.now() == (b"page 3", REFRESH_S)


def test_to_make_pages_takes_a_tenth_of_the_time_at_most(tmp_path, monkeypatch):
    now_s, made = [100.0], []

    def make(path):
        now_s[0] += 2.0
        made.append(path)
        return b"page %d" % len(made)

    monkeypatch.setattr("headway.cli.report_serve._page", make)
    run = write_run(tmp_path / "run", 3)
    live = LivePage(run, clock=lambda: now_s[0])
    assert live.now() == (b"page 1", 20)
    append(run, 4)
    now_s[0] = 119.9
    assert live.now() == (b"page 1", 20)
    now_s[0] = 120.0
    assert live.now() == (b"page 2", 20)


def test_the_file_of_a_meter_is_served_too(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(record(1))
    live = LivePage(file)
    assert live.now()[0] == report_page(read_run(file)).encode()
    file.unlink()
    assert b"Waiting" in LivePage(file).now()[0]


def test_options_that_contradict_name_both(headway, tmp_path):
    run = write_run(tmp_path / "run", 2)
    for arguments, named in (
        ((run, "--serve", "--md"), "--serve and --md are given"),
        ((run, "--serve", "-o", tmp_path / "x.html"), "--serve and -o are given"),
        ((run, run, "--serve"), "--serve and 2 runs are given"),
        ((run, "--port", 0), "--port 0 takes effect only with --serve"),
        ((tmp_path / "no-run", "--serve"), "does not exist"),
    ):
        said = headway("report", *arguments)
        assert (said.code, said.out) == (2, "")
        assert named in " ".join(said.err.split())
    assert not (tmp_path / "x.html").exists()


def test_a_port_in_use_is_one_error_with_the_way_out(headway, tmp_path):
    run = write_run(tmp_path / "run", 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = headway("report", run, "--serve", "--port", port)
    assert (said.code, said.out) == (2, "")
    assert " ".join(said.err.split()) == (
        f"Error: --port {port} of 127.0.0.1 cannot be used: Address already in use. "
        "Give another port, or --port 0 for any free one."
    )


def test_open_shows_the_address_in_the_browser(headway, tmp_path, monkeypatch):
    opened = []

    def show(address):
        opened.append(address)
        raise KeyboardInterrupt  # as if Ctrl-C came now

    monkeypatch.setattr("webbrowser.open", show)
    said = headway("report", write_run(tmp_path / "run", 2), "--serve", "--port", 0, "--open")
    assert said.code == 130
    assert said.out.startswith(f"{opened[0]} shows ")


def test_a_reader_that_leaves_in_the_middle_is_no_error(tmp_path):
    with served(write_run(tmp_path / "run", 2)) as (process, port):
        with socket.create_connection(("127.0.0.1", port)) as reader:
            reader.sendall(b"GET / HT")
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        assert ask(port)[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LIMIT_S) == ("", "")


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_in_a_browser_updates_itself(tmp_path):
    run = write_run(tmp_path / "run", 3)
    with served(run) as (_, port), Browser(tmp_path / "profile") as browser:
        address = f"http://127.0.0.1:{port}/"
        browser.show(address)
        assert "1 to 3, 3 records" in browser.value("document.body.textContent")
        browser.value("document.querySelector('.fold').open = true")
        append(run, 4)
        browser.follow("1")  # the browser loads the page again, and nobody tells it to
        assert "1 to 4, 4 records" in browser.value("document.body.textContent")
        assert browser.value("document.querySelector('.fold').open")  # is read on
        assert browser.errors == []
        assert {*browser.requests} == {address}


@pytest.mark.slow
def test_no_reader_waits_for_half_open_connections_and_they_are_closed(tmp_path):
    with served(write_run(tmp_path / "run", 3)) as (_, port):
        half_open = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) for _ in range(300)]
        for connection in half_open:
            connection.sendall(b"GET / HT")
        readers = [socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) for _ in range(200)]
        for reader in readers:
            reader.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert [reader.recv(15, socket.MSG_WAITALL) for reader in readers] == [b"HTTP/1.0 200 OK"] * 200
        assert [connection.recv(1) for connection in half_open] == [b""] * 300
        for connection in (*half_open, *readers):
            connection.close()
