"""A headless Chromium for tests, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START_S, _COMMAND_S = 60.0, 60.0
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars "
    "--disable-component-update --disable-sync --no-first-run --remote-debugging-port=0"
)


class Browser:
    """A Chromium process with one page, as a context manager.

    Args:
        profile: an empty directory for the browser's profile.

    Attributes:
        errors: errors of the console, of scripts and of the network so far.
        requests: addresses of all HTTP requests so far.
        file_bytes: total bytes of the responses to these requests as they were sent. Messages of
            WebSockets do not count.
    """

    def __init__(self, profile: Path) -> None:
        from websockets.sync.client import connect

        assert CHROMIUM is not None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.file_bytes = 0
        self._number = 0
        self._process = subprocess.Popen(
            [CHROMIUM, *_OPTIONS.split(), f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = _until(lambda: _port_of(profile), _START_S)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                pages = [page for page in json.load(answer) if page["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            self._stack = contextlib.ExitStack()
            self._socket = self._stack.enter_context(connect(address, max_size=None))
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self._process.kill()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command, and returns its result. Records the events that arrive meanwhile."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        deadline = time.monotonic() + _COMMAND_S
        while True:
            message = json.loads(self._socket.recv(timeout=max(0.1, deadline - time.monotonic())))
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._record(message)

    def _record(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.errors.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(json.dumps(params["entry"])[:500])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.loadingFinished":
                self.file_bytes += int(params["encodedDataLength"])

    def look(self, width: int, scheme: str, height: int = 1000) -> None:
        """Sets the size of the window in pixels, and the color scheme, `light` or `dark`."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Navigates to a page. Does not wait until the page is loaded."""
        self.send("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Evaluates a JavaScript expression, and returns its value."""
        result = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 120.0) -> Any:
        """Waits until the value of a JavaScript expression is true, and returns the value.

        Raises:
            TimeoutError: the value is not true within `timeout_s` seconds.
        """
        return _until(lambda: self.run(script), timeout_s, script)

    def screenshot(self, path: Path) -> None:
        """Saves the window as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


def _port_of(profile: Path) -> str:
    try:
        return (profile / "DevToolsActivePort").read_text().split("\n")[0]
    except FileNotFoundError:
        return ""


def _until(condition: Any, timeout_s: float, what: str = "the browser") -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s:g} s: {what}")
        time.sleep(0.2)
    return value
