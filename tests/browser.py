"""Headless Chromium for tests of pages, driven by chromedriver over HTTP."""

import base64
import json
import re
import subprocess
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
_TIMEOUT = 60.0  # seconds


class Browser:
    """A session of a browser."""

    def __init__(self, port: int, profile: Path) -> None:
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._url = f"http://127.0.0.1:{port}/session"
        capabilities = {
            "goog:chromeOptions": {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._send("", {"capabilities": {"alwaysMatch": capabilities}})
        self._url += f"/{answer['sessionId']}"

    def _send(self, command: str, arguments: Any, method: str = "POST") -> Any:
        data = json.dumps(arguments).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + command, data, headers, method=method)
        with self._opener.open(request, timeout=_TIMEOUT) as response:
            return json.load(response)["value"]

    def _devtools(self, command: str, **parameters: Any) -> Any:
        return self._send("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path, width: int, scheme: str = "light", media: str = "") -> None:
        """Opens a file in a window of a width, in the colour scheme "light" or "dark"."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", media=media, features=features)
        self._send("/url", {"url": path.as_uri()})

    def evaluate(self, script: str) -> Any:
        """Returns the result of the body of a JavaScript function."""
        return self._send("/execute/sync", {"script": script, "args": []})

    def press_space(self) -> None:
        """Presses the space bar in the element that has the focus."""
        event = {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32}
        self._devtools("Input.dispatchKeyEvent", type="keyDown", text=" ", **event)
        self._devtools("Input.dispatchKeyEvent", type="keyUp", **event)

    def messages(self) -> list[str]:
        """Returns and forgets the messages of the console."""
        return [entry["message"] for entry in self._send("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Returns and forgets the URLs that the page requested."""
        entries = self._send("/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        answer = self._devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self) -> bytes:
        """Returns the printed page."""
        return base64.b64decode(self._send("/print", {"background": False}))

    def close(self) -> None:
        """Ends the browser."""
        self._send("", {}, "DELETE")


def printed_glyphs(pdf: bytes) -> tuple[int, int]:
    """Returns the numbers of pages and of glyphs in a PDF file that Chromium printed."""
    glyphs = 0
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            content = zlib.decompress(stream)
        except zlib.error:
            continue  # an image or a font
        shown = b"".join(re.findall(rb"<([0-9A-Fa-f]+)>[^<>\[\]]*T[jJ]", content))
        shown += b"".join(
            code
            for text in re.findall(rb"\[([^\]]*)\]\s*TJ", content)
            for code in re.findall(rb"<([0-9A-Fa-f]+)>", text)
        )
        glyphs += len(shown) // 4  # two bytes per glyph
    return len(re.findall(rb"/Type\s*/Page\b", pdf)), glyphs


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """Starts a browser with a new profile, and ends it."""
    command = ["chromedriver", "--port=0"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        for line in driver.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise RuntimeError("chromedriver did not start")
        browser = Browser(int(match.group(1)), profile)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(_TIMEOUT)
        driver.stdout.close()
