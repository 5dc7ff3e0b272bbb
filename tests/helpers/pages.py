"""Pages as readers meet them: opened in a browser without a window, and the links of Markdown that lead nowhere."""

import base64
import json
import os
import re
import select
import shutil
import subprocess

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}  # by their codes on Windows
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
        typed = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key], **typed
            )

    def point(self, x, y):
        """Move the mouse to a place of the window [pixels]."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

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
