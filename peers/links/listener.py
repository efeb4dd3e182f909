"""Accepting connections on the data port: who is let in, and what for."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from peers import metrics
from peers.errors import RemoteProtocolError
from peers.links.opening import Opening, read_opening
from peers.links.sockets import endpoint_of_peer, listen, parse_endpoint, tune

logger = logging.getLogger(__name__)

OPENING_TIMEOUT = 10.0  # seconds
STRANGERS = 256  # connections at once that have not said who they are
STRANGERS_OF_ONE_ADDRESS = 80  # a peer may widen its link to 64, and many may live behind one address

Accept = Callable[[socket.socket, Opening], Awaitable[None]]
"""Takes the socket over. Raises: OSError, RemoteProtocolError."""


class Listener:
    """The data port, on all of these addresses."""

    def __init__(self, hosts: Sequence[str], port: int, accept: Accept) -> None:
        """Raises: LocalNetworkError when the port can't be used."""
        self._listeners = listen(hosts, port)
        self._accept = accept
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: Counter[str] = Counter()
        self.port: int = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            self._start(self._serve(listener))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # too many open files, or a connection that is gone already
                logger.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            self._start(self._welcome(sock))

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            who = endpoint_of_peer(tune(sock))
        except OSError:
            sock.close()
            return
        host, _ = parse_endpoint(who)
        if self._strangers.total() >= STRANGERS or self._strangers[host] >= STRANGERS_OF_ONE_ADDRESS:
            sock.close()
            return
        self._strangers[host] += 1
        try:
            opening = await self._read_opening(sock, who)
            await self._accept(sock, opening)
        except RemoteProtocolError as error:
            metrics.DROPPED.labels("connection").inc()
            logger.debug("dropped a connection of %s: %s", who, error)
        except OSError as error:
            logger.debug("a connection of %s broke: %s", who, error)
        finally:
            self._strangers[host] -= 1
            if not self._strangers[host]:
                del self._strangers[host]

    async def _read_opening(self, sock: socket.socket, who: str) -> Opening:
        try:
            async with asyncio.timeout(OPENING_TIMEOUT):
                return await read_opening(sock, who)
        except TimeoutError as error:
            sock.close()
            raise OSError("it does not say what it wants") from error
        except BaseException:
            sock.close()
            raise
