"""torchrun's store, as a process of its own asks it: the peer process has no torch in it.

Started as `python -m opendiloco.island.store HOST PORT`; each line on its standard input is a request in JSON, `["set",
KEY, VALUE]`, `["get", KEY]`, which waits until there is a value, or `["has", KEY]`. It answers each with a line, as
JSON: the value, or of `has` a text that is empty where there is none.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

from opendiloco.errors import IslandError
from peers.net.signals import signals_held_back

PATIENCE = timedelta(minutes=10)
"""How long machines may take to start, one after another."""
VALUE_LIMIT = 1 << 14


class StoreClient:
    """Such a process. Made by `store_client`."""

    def __init__(self, process: asyncio.subprocess.Process, where: str) -> None:
        self._process = process
        self._where = where
        self._turn = asyncio.Lock()

    async def set(self, key: str, value: str) -> None:
        """Put a value into the store. Raises: IslandError."""
        await self._ask("set", key, value)

    async def get(self, key: str) -> str:
        """Return a value once it is there. Raises: IslandError."""
        return await self._ask("get", key)

    async def has(self, key: str) -> bool:
        """Return whether there is a value. Raises: IslandError."""
        return bool(await self._ask("has", key))

    async def _ask(self, *request: str) -> str:
        """Each request waits for its answer, also when whoever asks is cancelled: the next one gets its own."""
        asking = asyncio.create_task(self._exchange(request))
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(asking)

    async def _exchange(self, request: Sequence[str]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with self._turn:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                answer = json.loads(await self._process.stdout.readline())
        except (ValueError, OSError) as error:
            raise self._unreachable() from error
        if not isinstance(answer, str) or len(answer) > VALUE_LIMIT:
            raise self._unreachable()
        return answer

    def _unreachable(self) -> IslandError:
        return IslandError(
            f"torchrun's store at MASTER_ADDR and MASTER_PORT = {self._where} does not answer.",
            "Check that torchrun runs on all machines, and that they can reach this address.",
        )


@asynccontextmanager
async def store_client(host: str, port: int) -> AsyncIterator[StoreClient]:
    """Ask torchrun's store within this context. Raises: IslandError."""
    try:
        with signals_held_back():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "opendiloco.island.store", host, str(port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
    except OSError as error:
        raise IslandError(f"no process can be started to ask torchrun's store: {error.strerror}.") from error
    try:
        yield StoreClient(process, f"{host}:{port}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main(host: str, port: int) -> None:
    """Carry out the requests on the standard input, until it ends: also in the middle of one."""
    requests = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read_into, args=(requests,), daemon=True).start()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    while True:
        what, key, *values = json.loads(requests.get())
        if what == "set":
            store.set(key, values[0])
        is_there = what != "has" or store.check([key])
        print(json.dumps(store.get(key).decode() if is_there else ""), flush=True)


def _read_into(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
