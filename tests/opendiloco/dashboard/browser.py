"""A headless Chromium, told what to do over its debugging protocol, and what it says of a page."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 30.0  # seconds that anything may take
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
)


class Page:
    """One page: `errors` are what its console and its network complained of, `requests` what it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count(1)
        self._reading = asyncio.create_task(self._read())
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._hear(said["method"], said["params"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(LIMIT):
            said = await answer
        if "error" in said:
            raise AssertionError(f"{method}: {said['error']}")
        found: dict[str, Any] = said["result"]
        return found

    async def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")
        await self.resize(width, height)
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.ask("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def evaluate(self, expression: str) -> Any:
        said = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true. Raises: AssertionError that names it."""
        try:
            async with asyncio.timeout(LIMIT):
                while not await self.evaluate(expression):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{shown}\n{self.errors}") from None

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@contextmanager
def browser(folder: Path) -> Iterator[int]:
    """A browser of our own, whose profile is in `folder`: the port on which it can be told what to do."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    # In a session of its own: it starts processes, which have to end with it.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield _port(folder / "DevToolsActivePort")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@asynccontextmanager
async def new_page(port: int) -> AsyncIterator[Page]:
    """A page of the browser that listens there."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
            target = await answer.json(content_type=None)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
            page = Page(socket)
            try:
                yield page
            finally:
                with suppress(TimeoutError, ConnectionError, AssertionError):
                    await page.ask("Page.close")
                await page.close()


def _port(file: Path) -> int:
    """The port that the browser says it listens on, once it does."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        lines = file.read_text().split() if file.exists() else []
        if len(lines) > 1:
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"the browser has not said within {LIMIT:.0f} seconds where it listens")
