"""Chromium without a window, driven by its own protocol through a pipe: a page as a person sees it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: the file descriptors from which Chromium reads commands, and to which it writes answers
_COMMANDS, _ANSWERS = 3, 4
_WAIT_SECONDS = 60.0


class Page:
    """A page in a tab: what it did, what is in it, and what a person can do there."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._buffer, self._number = commands, answers, b"", 0
        self._session: str | None = None
        #: what the page complained of, and the addresses that it asked for, its own left out
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Performance.enable", timeDomain="threadTicks")
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command of the protocol."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        told = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(told).encode() + b"\0")
        end = monotonic() + _WAIT_SECONDS
        while True:
            answer = self._answer(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _answer(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - monotonic()))
            block = os.read(self._answers, 1 << 20) if ready else b""
            assert block, "the browser does not answer"
            self._buffer += block
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(told))
        elif event.get("method") == "Network.requestWillBeSent":
            address = told["request"]["url"]
            if address.partition("#")[0] != told["documentURL"].partition("#")[0] and not address.startswith("data:"):
                self.requests.append(address)

    def open(self, file: Path, *, place: str = "", width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Open a file at a width, and wait until all its charts are drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=file.resolve().as_uri() + place)
        self.settle()

    def settle(self) -> None:
        """Wait until all charts are drawn."""
        end = monotonic() + _WAIT_SECONDS
        while self.value("document.documentElement.dataset.drawn") is None:
            assert monotonic() < end, f"the page is not ready: {self.complaints}"

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def cpu_seconds(self) -> float:
        """Return the time of the page's thread since it began to load; that of other processes is not in it."""
        found = {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"])

    def press(self, key: str, code: int) -> None:
        """Press a key, by its name and its number."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of each element, as a screen reader gets them."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in shown]

    def screenshot(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """Run a browser that has no network; its profile is in a folder."""
    assert CHROMIUM is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'user'}", "--remote-debugging-pipe",
    ]  # fmt: skip

    def connect() -> None:
        spare = [os.dup(theirs_in), os.dup(theirs_out), os.dup(theirs_in), os.dup(theirs_out)][2:]
        os.dup2(spare[0], _COMMANDS)
        os.dup2(spare[1], _ANSWERS)

    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=connect)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        process.terminate()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
