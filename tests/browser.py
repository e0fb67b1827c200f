"""Headless Chromium, spoken to over its DevTools protocol through two pipes: no package, no port, no driver.

    with Browser() as browser:
        page = browser.open(path, width=390, dark=True)
        page.run("document.title")
        page.click("#theme")
        assert page.errors == []
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One process; FileNotFoundError where there is no Chromium."""

    def __enter__(self) -> Browser:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise FileNotFoundError("Chromium is not installed, and pages are tested in it: apt install chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="fsdp_compile_chromium_", ignore_cleanup_errors=True)
        theirs, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        arguments = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        # It reads commands from 3 and writes answers to 4. A shell puts them there: no code runs between fork and exec.
        shell = ["sh", "-c", 'exec 3<&0 4>&1 </dev/null >/dev/null; exec "$@"', "sh", *arguments]
        self._process = subprocess.Popen(shell, stdin=theirs, stdout=answers, stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(answers)
        self._read = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, EOFError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._profile.cleanup()

    def call(self, method: str, session: str = "", **given: Any) -> dict[str, Any]:
        """The answer to one command; events that come before it are kept."""
        number = self._send(method, session, given)
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _send(self, method: str, session: str, given: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._number

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended")
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Load a file, offline, in a window of that size."""
        page = self._tab()
        page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
        self._load(page, path.resolve().as_uri(), width, height, dark)
        return page

    def _tab(self) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def _load(self, page: Page, url: str, width: int, height: int, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )
        page.call("Page.navigate", url=url)
        # What a page adds comes as several tasks; the second frame has all of them behind it.
        page.run(
            "new Promise(done => { const wait = () => document.readyState === 'complete'"
            " ? requestAnimationFrame(() => requestAnimationFrame(done)) : setTimeout(wait, 10); wait(); })"
        )


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **given)

    def run(self, script: str) -> Any:
        """What an expression gives; RuntimeError where it raises."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", str(found)))
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of the first such element."""
        box = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            " one.scrollIntoView({block: 'center'});"
            " const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Letters into a field, in place of what was there."""
        self.run(f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.focus(); one.select(); }})()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key="Delete", code="Delete", windowsVirtualKeyCode=46)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)")
        return found

    @property
    def errors(self) -> list[str]:
        """What went to the console as an error, was thrown, or was asked of a network."""
        self.run("1")
        said = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            given = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                said.append(str(given["exceptionDetails"].get("exception", given["exceptionDetails"])))
            elif event["method"] == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
                said.append(f"{given['type']}: {given['args']}")
            elif event["method"] == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                said.append(str(given["entry"]["text"]))
            elif event["method"] == "Network.requestWillBeSent":
                url = given["request"]["url"]
                if not url.startswith(("file:", "data:", "blob:file:")):
                    said.append(f"asked for {url}")
        return said
