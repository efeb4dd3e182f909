"""Stands before the dashboard's server, so that nobody keeps all others out: by many connections, by requests of which
the end never comes, or by answers that are never read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address, ip_network

MOST_CONNECTIONS = 500
MOST_OF_ONE_ADDRESS = 25
"""A browser has six at most, but several people may share an address, or a proxy. This machine's own have no limit."""
REQUEST_SECONDS = 10.0
"""Within which the first request has to be there, without its body, which nobody reads."""
WRITE_SECONDS = 30.0
"""For which whoever does not read is waited for."""
IPV6_PREFIX = 64
"""Bits of an IPv6 address that make one customer; the others are free to choose."""
END_OF_REQUEST = b"\r\n\r\n"


class Doorman:
    """Counts connections. `handler` makes the protocol that serves one."""

    def __init__(self, handler: Callable[[], asyncio.Protocol]) -> None:
        self._handler = handler
        self._counts = Counter[str]()

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""
        return _Connection(self._handler(), self)

    def come(self, address: str) -> bool:
        """Count a connection from an address. Return whether there is room for it."""
        self._counts[address] += 1
        is_alone = self._counts[address] <= MOST_OF_ONE_ADDRESS or ip_address(address).is_loopback
        return is_alone and self._counts.total() <= MOST_CONNECTIONS

    def go(self, address: str) -> None:
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


class _Connection(asyncio.Protocol):
    """Passes on to the handler what happens on one connection, unless it is refused, and ends it when time is up."""

    def __init__(self, handler: asyncio.Protocol, doorman: Doorman) -> None:
        self._handler = handler
        self._doorman = doorman
        self._address = ""
        self._is_let_in = False
        self._transport: asyncio.Transport
        self._end = b""  # of what came, while the first request is not there
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._address = transport, customer(transport.get_extra_info("peername")[0])
        self._is_let_in = self._doorman.come(self._address)
        if self._is_let_in:
            self._waiting = self._abort_after(REQUEST_SECONDS)
            self._handler.connection_made(transport)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._waiting is not None:
            self._end += data
            if END_OF_REQUEST in self._end:
                self._waiting.cancel()
                self._waiting = None
            self._end = self._end[1 - len(END_OF_REQUEST) :]
        if self._is_let_in:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._is_let_in else None

    def pause_writing(self) -> None:
        self._writing = self._abort_after(WRITE_SECONDS)
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._doorman.go(self._address)
        for timer in (self._waiting, self._writing):
            if timer is not None:
                timer.cancel()
        if self._is_let_in:
            self._handler.connection_lost(error)

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self._transport.abort)


def customer(host: str) -> str:
    """Return the address by which connections from a host are counted."""
    address = ip_address(host.partition("%")[0])
    if address.version == 6 and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    if address.version == 6 and not address.is_loopback:
        return str(ip_network((int(address), IPV6_PREFIX), strict=False).network_address)
    return str(address)
