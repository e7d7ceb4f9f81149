"""A real browser without a screen, driven over WebDriver (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness import SECONDS, eventually

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


class Browser:
    """A session of Chromium with an empty profile."""

    def __init__(self) -> None:
        assert BROWSER is not None
        assert DRIVER is not None
        self._profile = tempfile.mkdtemp(prefix="kvs-browser-")
        # It prints the port that the system chose.
        self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        said = ""
        while "started successfully on port" not in said:
            said = self._driver.stdout.readline()
            assert said, "chromedriver ended"
        self._base = f"http://127.0.0.1:{said.split('port')[-1].strip(' .' + chr(10))}"
        options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={self._profile}"]}
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self._base += f"/session/{self._call('/session', {'capabilities': wanted})['sessionId']}"

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return json.load(reply)["value"]

    @contextmanager
    def beginning_with(self, script: str) -> Iterator[None]:
        """Each page that is opened meanwhile runs this before its own scripts."""
        added = self._devtools("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        yield
        self._devtools("Page.removeScriptToEvaluateOnNewDocument", added)

    def open(self, url: str) -> None:
        self._call("/url", {"url": url})

    def run(self, script: str) -> Any:
        """What JavaScript returns."""
        return self._call("/execute/sync", {"script": script, "args": []})

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        shown = str(self.run(f"return document.querySelector({json.dumps(selector)}).innerText"))
        return shown.replace("\N{NO-BREAK SPACE}", " ")

    def until(self, selector: str, wanted: str) -> str:
        eventually(lambda: wanted in self.text(selector), lambda: f"{wanted!r} not in {self.text(selector)!r}")
        return self.text(selector)

    def show_as(self, width: int, height: int, *, dark: bool = False) -> None:
        """A screen of this size. Chromium makes no window as narrow as a phone, so the device is emulated."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", {"features": scheme})

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("/screenshot", method="GET")))

    def complaints(self) -> list[str]:
        """What the console has said since the last time: errors, refused resources."""
        return [each["message"] for each in self._call("/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("", method="DELETE")
        self._driver.terminate()
        self._driver.wait(SECONDS)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        shutil.rmtree(self._profile, ignore_errors=True)
