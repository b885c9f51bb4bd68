"""A headless Chromium that tests drive: open a page, see what it logs and asks the network for, move, click, type.

It speaks the DevTools protocol over two pipes (`--remote-debugging-pipe`): messages of JSON that end in a zero byte. No
driver, no web socket and no package is needed, only the browser. Nothing here knows what is on a page.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds that a page may take to load: with other tests beside it, a browser is slow
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# The browser finds its pipes at the numbers 3 and 4. Copies come first: one of ours may have such a number already.
_LAUNCH = """
import fcntl, os, sys
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(copies[0], 3)
os.dup2(copies[1], 4)
os.closerange(5, 100)
os.execv(sys.argv[3], sys.argv[3:])
"""


class BrowserError(Exception):
    """The browser, or a script in a page, did not do what it was told."""


def find() -> str | None:
    """The browser: `$ELLZERO_BROWSER`, or one that is installed; None where there is none, or no pipes to pass on."""
    if os.name == "nt":
        return None
    named = os.environ.get("ELLZERO_BROWSER")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with a profile of its own, without a screen and without a way to the network."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="ellzero-browser-", ignore_cleanup_errors=True)
        home = Path(self.profile.name)
        words = [program, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={home}"]
        words += ["--no-first-run", "--no-default-browser-check", "--disable-gpu", "--disable-dev-shm-usage"]
        words += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]  # but `report --serve` is there
        words += ["--force-device-scale-factor=1", "--mute-audio"]
        # Without a screen it believes that there is no mouse.
        words += [
            "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"
        ]
        words.append("--no-sandbox")  # root and many containers cannot have one, and the pages are our own
        self.log = home / "said.txt"
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCH, str(theirs_in), str(theirs_out), *words],
                    pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, env={**os.environ, "HOME": str(home)},
                )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._rest, self._number = b"", 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}
        try:
            self.version = self.ask("Browser.getVersion")["product"]
        except BaseException:
            self.close()
            raise

    # ---- messages ---------------------------------------------------------------------------------------------------

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for what it gives."""
        deadline = time.monotonic() + PATIENCE
        number = self.send(method, session, **parameters)
        while number not in self._answers:
            if not self.listen(deadline - time.monotonic()):
                raise BrowserError(f"`{method}` had no answer in {PATIENCE:.0f} s; the browser said: {self._said()}")
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"`{method}` failed: {answer['error']['message']}")
        return dict(answer["result"])

    def send(self, method: str, session: str | None = None, **parameters: Any) -> int:
        """Sends a command; its number, which the answer will have."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        deadline = time.monotonic() + PATIENCE
        while data:
            _, ready, _ = select.select([], [self._out], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise BrowserError(f"`{method}` could not be sent: the browser hangs")
            try:
                data = data[os.write(self._out, data[:4096]) :]
            except OSError as error:
                raise BrowserError(f"the browser ended; it said: {self._said()}") from error
        return number

    def listen(self, seconds: float) -> bool:
        """Reads what there is, waiting so long for it; whether there was something."""
        ready, _, _ = select.select([self._in], [], [], max(0.0, seconds))
        if not ready:
            return False
        data = os.read(self._in, 1 << 20)
        if not data:
            raise BrowserError(f"the browser ended; it said: {self._said()}")
        *messages, self._rest = (self._rest + data).split(b"\0")
        for text in messages:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._tabs:
                self._tabs[message["sessionId"]]._heard(message["method"], message["params"])
        return True

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    # ---- tabs -------------------------------------------------------------------------------------------------------

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False, touch: bool = False) -> Tab:
        """A page in a new tab, loaded, with its scripts run."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.ask(f"{domain}.enable")
        tab.resize(width, height, dark=dark, touch=touch)
        tab.go(url)
        return tab

    def close(self) -> None:
        """Ends the browser and all its processes, which are in a group of their own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        os.close(self._in)
        os.close(self._out)
        self.profile.cleanup()


class Tab:
    """A page that is open. `problems`: what its console shows and what it throws; `requests`: what it asks for."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self._loads = 0
        self._touch: bool | None = None

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **parameters)

    def _heard(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Runtime.consoleAPICalled":
                words = [str(a.get("value", a.get("description"))) for a in event["args"]]
                self.problems.append(f"console.{event['type']}: {' '.join(words)}")
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded":
                self.problems.append(f"{event['entry']['level']}: {event['entry']['text']}")
            case "Network.requestWillBeSent":
                url = event["request"]["url"]
                if not url.startswith(("data:", "blob:")):  # are in the page already
                    self.requests.append(url)
            case "Network.webSocketCreated" | "Network.webTransportCreated":
                self.requests.append(event["url"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(event["message"])  # it stands still until somebody answers
                self.browser.send("Page.handleJavaScriptDialog", self.session, accept=True)
            case "Page.loadEventFired":
                self._loads += 1

    def front(self) -> None:
        """Comes before the other tabs: of those behind, nothing is drawn."""
        self.ask("Page.bringToFront")

    def resize(self, width: int, height: int = 900, *, dark: bool = False, touch: bool = False) -> None:
        """Another window: its size in pixels, whether the system is dark, whether there is a finger and no mouse."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        if touch != self._touch:  # asked again in a page that is open, it forgets that there is a mouse
            self.ask("Emulation.setTouchEmulationEnabled", enabled=touch)
            self._touch = touch
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.settle()

    def go(self, url: str) -> None:
        """Opens another page in this tab."""
        loads = self._loads
        answer = self.ask("Page.navigate", url=url)
        if answer.get("errorText"):
            raise BrowserError(f"{url} does not open: {answer['errorText']}")
        self.loaded(loads)

    def loaded(self, before: int, seconds: float = PATIENCE) -> None:
        """Waits until a page is loaded, when `before` were."""
        deadline = time.monotonic() + seconds
        while self._loads <= before:
            if not self.browser.listen(deadline - time.monotonic()):
                raise BrowserError(f"the page did not load in {seconds:.0f} s, problems: {self.problems}")
        self.settle()

    def settle(self) -> None:
        """Waits until what is waiting to be drawn is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(null))))")

    # ---- looking ----------------------------------------------------------------------------------------------------

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, or what its promise gives, as plain data."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true, and gives its value."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(f"never true: {expression}")
            self.browser.listen(0.05)
        return value

    def ready(self) -> None:
        """Waits until a page says that all is drawn and heeds the pointer, and the browser has shown it.

        Before the first picture of a page, the browser throws away what the mouse does, and says nothing.
        """
        self.wait("document.documentElement.dataset.ready && performance.getEntriesByType('paint').length")
        self.settle()

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    # ---- doing ------------------------------------------------------------------------------------------------------

    def hover(self, x: float, y: float) -> None:
        """Moves the mouse there, over a point beside it: what is under it must see it move."""
        for dx in (-2, 0):
            self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        self.hover(x, y)
        self.press_here(x, y)

    def press_here(self, x: float, y: float) -> None:
        """Presses the button of the mouse once and lets it go, where the mouse is already."""
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, times: int = 1) -> None:
        """Presses a key by its name, such as "ArrowRight" or "Tab"."""
        code = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        for _ in range(times):
            down = {"key": key, "code": key, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
            self.ask("Input.dispatchKeyEvent", type="keyDown", **down)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)
        self.settle()

    def close(self) -> None:
        self.browser.ask("Target.closeTarget", targetId=self.target)
        self.browser._tabs.pop(self.session, None)
