"""Visitors who would keep all others out: with many connections, half a request, or answers that they do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from opendiloco.dashboard import server
from opendiloco.dashboard.server import MOST_OF_ONE_ADDRESS, _customer, _Doorman, bind, dashboard

LIMIT = 20.0  # seconds that anything may take
CLOSED = (ConnectionError, asyncio.IncompleteReadError)
REQUEST = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"


def visiting(visit: Callable[[int], Awaitable[None]]) -> None:
    """Have somebody visit a dashboard, at a port of this machine."""

    async def scenario() -> None:
        listening = bind(("127.0.0.1", 0))
        async with dashboard(listening, list), asyncio.timeout(LIMIT):
            await visit(listening.getsockname()[1])

    asyncio.run(scenario())


@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nHost: loc", REQUEST[:-1]])
def test_half_a_request_does_not_stay_open(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.1)

    async def visit(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(half)
        with pytest.raises(CLOSED):
            await reader.readexactly(1)
        writer.close()

    visiting(visit)


def test_a_request_in_pieces_is_answered_and_its_connection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[float] = []
    monkeypatch.setattr(server._Connection, "_abort_after", lambda self, seconds: Timer(seconds, aborted))

    async def visit(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for byte in REQUEST:
            writer.write(bytes([byte]))
            await writer.drain()
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        assert aborted == [server.REQUEST_SECONDS], "it is not waited for any more"
        writer.close()

    visiting(visit)


class Timer:
    """Notes that it was cancelled."""

    def __init__(self, seconds: float, cancelled: list[float]) -> None:
        self._seconds, self._cancelled = seconds, cancelled

    def cancel(self) -> None:
        self._cancelled.append(self._seconds)


def test_whoever_does_not_read_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.1)
    lost = asyncio.Event()

    class Talkative(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(bytes(1 << 26))

        def connection_lost(self, error: Exception | None) -> None:
            lost.set()

    async def scenario() -> None:
        server = await asyncio.get_running_loop().create_server(_Doorman(Talkative), "127.0.0.1", 0)
        async with server, asyncio.timeout(LIMIT):
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1)
            await lost.wait()
            writer.close()

    asyncio.run(scenario())


def test_one_address_has_its_share_and_this_machine_has_all_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    door = _Doorman(asyncio.Protocol)
    assert all(door.come("203.0.113.5") for _ in range(MOST_OF_ONE_ADDRESS))
    assert not door.come("203.0.113.5")
    assert door.come("203.0.113.6")
    assert all(door.come("127.0.0.1") for _ in range(2 * MOST_OF_ONE_ADDRESS))
    for _ in range(2):
        door.go("203.0.113.5")
    assert door.come("203.0.113.5")
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 10)
    assert not door.come("127.0.0.1")


def test_too_many_connections_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)

    async def visit(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        other, closed = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(CLOSED):
            await other.readexactly(1)
        closed.close()
        writer.close()

    visiting(visit)


@pytest.mark.parametrize(
    ("host", "counted"),
    [
        ("203.0.113.5", "203.0.113.5"),
        ("::ffff:203.0.113.5", "203.0.113.5"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::1"),
    ],
)
def test_a_customer_of_ipv6_has_many_addresses(host: str, counted: str) -> None:
    assert _customer(host) == counted
