"""Stands before the dashboard's server, so that nobody keeps all others out: by many connections, by requests of which
the end never comes, or by answers that are never read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from peers.network.own_network import network_of

MOST_CONNECTIONS = 250
"""Of more, the oldest goes of the network that has most."""
REQUEST_SECONDS = 10.0
"""Within which the first request has to be there, without its body, which nobody reads."""
WRITE_SECONDS = 30.0
"""For which whoever does not read is waited for."""
END_OF_REQUEST = b"\r\n\r\n"


class Doorman:
    """Counts connections. `handler` makes the protocol that serves one."""

    def __init__(self, handler: Callable[[], asyncio.Protocol]) -> None:
        self._handler = handler
        self._networks: dict[_Connection, str] = {}  # of the open connections, the oldest first

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""
        return _Connection(self._handler(), self)

    def come(self, connection: _Connection, network: str) -> None:
        """Count a connection, and end another one where there are too many: a flood drives out only its own."""
        self._networks[connection] = network
        if len(self._networks) > MOST_CONNECTIONS:
            counts = Counter(self._networks.values())
            fullest = max(counts, key=counts.__getitem__)
            oldest = next(one for one, network in self._networks.items() if network == fullest)
            self.go(oldest)
            oldest.abort()

    def go(self, connection: _Connection) -> None:
        """Count a connection no more."""
        self._networks.pop(connection, None)


class _Connection(asyncio.Protocol):
    """Passes on to the handler what happens on one connection, and ends it when time is up."""

    def __init__(self, handler: asyncio.Protocol, doorman: Doorman) -> None:
        self._handler = handler
        self._doorman = doorman
        self._transport: asyncio.Transport
        self._end = b""  # of what came, while the first request is not there
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._waiting = self._abort_after(REQUEST_SECONDS)
        self._handler.connection_made(transport)
        self._doorman.come(self, network_of(transport.get_extra_info("peername")[0]))

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None:
            self._end += data
            if END_OF_REQUEST in self._end:
                self._waiting.cancel()
                self._waiting = None
            self._end = self._end[1 - len(END_OF_REQUEST) :]
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._writing = self._abort_after(WRITE_SECONDS)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._doorman.go(self)
        for timer in (self._waiting, self._writing):
            if timer is not None:
                timer.cancel()
        self._handler.connection_lost(error)

    def abort(self) -> None:
        self._transport.abort()

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.abort)
