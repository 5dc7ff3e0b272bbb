"""Pages as readers meet them: in a browser without a window, made-up runs for them, and links that lead nowhere."""

import base64
import json
import os
import re
import select
import shutil
import subprocess

from headway.pages.page import page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}  # by their codes on Windows
_LETTERS = {"+": 187, "-": 189, "0": 48}  # keys that write themselves
LIMIT_S = 60  # without an answer for so long, the browser hangs


class Browser:
    """One page in one browser; what went wrong in it and what it asked of other hosts is kept.

    Attributes:
        errors: messages of errors and warnings, of scripts and of the browser itself.
        requests: addresses on other hosts that a page asked for.
    """

    def __init__(self, profile):
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        pipes = f"3</dev/fd/{commands_read} 4>/dev/fd/{answers_write}"  # the numbers that the browser reads and writes
        self._process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {pipes}', "sh", CHROMIUM, *quiet],
            pass_fds=(commands_read, answers_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_read)
        os.close(answers_write)
        self.errors, self.requests = [], []
        self._loaded, self._rest, self._sent, self._session = False, b"", 0, None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = None
        self._call("Browser.close")
        self._process.wait(LIMIT_S)
        os.close(self._commands)
        os.close(self._answers)

    def show(self, url, *, width=1280, dark=False, media="screen"):
        """Open a page at a width [pixels] and wait until it is loaded; as `media` "print" has it on paper."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=url)
        self._wait_until_loaded()

    def follow(self, expression):
        """Evaluate an expression that leads to another page, and wait until that is loaded."""
        self._loaded = False
        self.value(expression)
        self._wait_until_loaded()

    def value(self, expression):
        """Evaluate an expression of JavaScript in the page; a promise is waited for."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, selector):
        """Wait until an element is in the page."""
        while not self.value(
            f"new Promise(done => setTimeout(() => done(!!document.querySelector({selector!r})), 50))"
        ):
            assert not self.errors

    def press(self, key):
        """Press a key as a person does, such as Tab."""
        typed = {"text": "\r" if key == "Enter" else key} if key == "Enter" or key in _LETTERS else {}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=(_KEYS | _LETTERS)[key],
                **typed,
            )

    def point(self, x, y):
        """Move the mouse to a place of the window [pixels]."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, start, end):
        """Press the mouse at one place of the window, move it to another and let go [pixels]."""
        button = {"button": "left", "clickCount": 1}
        for kind, (x, y), more in (
            ("mouseMoved", start, {}),
            ("mousePressed", start, button),
            ("mouseMoved", ((start[0] + end[0]) / 2, end[1]), {"button": "left"}),
            ("mouseMoved", end, {"button": "left"}),
            ("mouseReleased", end, button),
        ):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def stretch(self, width):
        """Make the window as high as its page, up to 12,000 pixels."""
        height = min(self.value("document.documentElement.scrollHeight"), 12_000)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path):
        """Write what is seen as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _wait_until_loaded(self):
        while not self._loaded:
            self._read()

    def _call(self, method, **params):
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self):
        """Read one message, and keep what an event in it says."""
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], LIMIT_S)[0] or not (more := os.read(self._answers, 2**16)):
                raise TimeoutError(f"{CHROMIUM} gave no answer in {LIMIT_S} s, or ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url')}")
            case "Network.requestWillBeSent" if params["request"]["url"].startswith(("http", "ws", "//")):
                self.requests.append(params["request"]["url"])
        return message


def write_run(folder, num_steps, *, source="a", **more):
    """Write records as a meter does, with times that are made up."""
    folder.mkdir(exist_ok=True)
    lines = []
    for step in range(1, num_steps + 1):
        wall_s = 2.5 if step == 7 else 0.5 + 0.001 * (step % 10)
        record = {
            "schema_version": 1,
            "kind": "step",
            "step": step,
            "num_steps": 1,
            "wall_s": wall_s,
            "step_s": wall_s,
            "data_wait_s": 0.1,
            "data_wait_share": 0.1 / wall_s,
            "tokens": 100,
            "slots": 120,
            "world_size": 1,
            "padding_share": 1 / 6,
            "flops": {"total": 9000, "forward": 3000, "dgrad": 3000, "wgrad": 3000, "recompute": 0},
            "flops_by_component": {"language.mlp": 6000, "language.attention": 3000},
            "mfu": 9000 / wall_s / 1e5,
            "tokens_per_s": 100 / wall_s,
            "convention": "useful",
            "peak_flops_per_s": 1e5,
            "peak_dtype": "fp32",
            "peak_source": "made up for a test",
            "loss": 3.0 / step,
            "sources": {source: {"loss": 3.0 / step, "tokens": 100}},
            **more,
        }
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


FENCED = re.compile(r"^(`{3,}).*?^\1$", flags=re.MULTILINE | re.DOTALL)


def broken_links(page):
    """List the links of a page, as written, that lead to nothing in the repository."""
    text = re.sub(r"`[^`\n]+`", "", FENCED.sub("", page.read_text(encoding="utf-8")))
    links = re.findall(r"\]\((?!\w+:)([^)\s#]*)(#[^)\s]+)?\)", text)
    return [path + heading for path, heading in links if not _leads_somewhere(page, path, heading)]


def _leads_somewhere(page, path, heading):
    target = page.parent / path if path else page
    return target.exists() and (not heading or heading[1:] in anchors(target))


def anchors(page):
    """List the anchors of a page's headings, as GitHub makes them; a second heading of the same words ends in -1."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    found = []
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        again = sum(one == slug for one, _ in found)
        found.append((slug, f"{slug}-{again}" if again else slug))
    return [anchor for _, anchor in found]


def report_markdown(*runs):
    """The page of a run, or of two, as Markdown."""
    return page_of(*runs).as_markdown()
