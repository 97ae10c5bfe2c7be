"""Chromium without a window, driven by its own protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE = 60
"""Seconds after which something does not happen any more; other processes may have the cores."""


def browser() -> str | None:
    """The path of a browser, None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened(url: str, folder: Path, width: int = 900, height: int = 700) -> Iterator[Page]:
    """A `with` block with a page. folder: an empty one for the browser's own files."""
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder}", "--remote-debugging-port=0", "--no-first-run"]
    command += [f"--window-size={width},{height}", "about:blank"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        said = _until(lambda: _text(folder / "DevToolsActivePort").split())
        tabs = httpx.get(f"http://127.0.0.1:{said[0]}/json/list", timeout=PATIENCE).json()
        (tab,) = (one for one in tabs if one["type"] == "page")
        with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            page.open(url)
            yield page
    finally:
        child.terminate()
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class Page:
    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._ids = socket, itertools.count(1)
        self.faults: list[str] = []
        """What went wrong in its scripts, and what it was not allowed."""
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        id = next(self._ids)
        self._socket.send(json.dumps({"id": id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == id:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.faults.append(json.dumps(message["params"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """Of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression holds."""
        _until(lambda: self.value(f"Boolean({script})"), seconds)

    def type(self, text: str) -> None:
        """Write a text where the cursor is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        more = {"text": "\r"} if key == "Enter" else {}
        event = {"key": key, "windowsVirtualKeyCode": code, **more}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **event)

    def click(self, selector: str) -> None:
        """In the middle of the last element that a selector finds."""
        x, y = self.value(
            f"{{const e = [...document.querySelectorAll({selector!r})].at(-1);"
            " e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            " [r.x + r.width / 2, r.y + r.height / 2]}"
        )
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def give_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def drop(self, name: str, data: bytes) -> None:
        """Let a file fall onto the page."""
        letters = (
            f"Uint8Array.from(atob('{base64.b64encode(data).decode()}'), c => c.charCodeAt(0))"
        )
        self.value(
            "{const d = new DataTransfer();"
            f" d.items.add(new File([{letters}], {json.dumps(name)}));"
            " dispatchEvent(new DragEvent('drop', {dataTransfer: d, cancelable: true}))}"
        )

    def set_scheme(self, name: str) -> None:
        """The system's colours: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """A PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _until(condition: Any, seconds: float = PATIENCE) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
    return found
