"""Visitors who would keep all others out: with many connections, half a request, or answers that they do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from opendiloco.dashboard import server
from opendiloco.dashboard.server import _Connection, bind, dashboard

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
    monkeypatch.setattr(_Connection, "_abort_after", lambda self, seconds: Timer(seconds, aborted))

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
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(Talkative(), {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(LIMIT):
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1)
            await lost.wait()
            writer.close()

    asyncio.run(scenario())


def test_many_idle_connections_shut_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 20 addresses with 25 idle connections each, or four with 25 open pages, kept all others out."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 10)
    events = REQUEST.replace(b"/api/runs", b"/events")

    async def visit(port: int) -> None:
        flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(25)]
        for _, writer in flood:
            writer.write(events)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(events)
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        with pytest.raises(CLOSED):
            await flood[0][0].readuntil(b"nobody says this")
        for _, each in [*flood, (reader, writer)]:
            each.close()

    visiting(visit)


def test_a_flood_drives_out_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 10)
    networks, ended = dict[_Connection, str](), list[object]()
    monkeypatch.setattr(_Connection, "abort", lambda connection: ended.append(connection))

    def visitor(network: str) -> _Connection:
        connection = _Connection(asyncio.Protocol(), networks)
        connection._count(network)
        return connection

    home = visitor("home")
    first, *_ = (visitor("flood") for _ in range(50))
    assert len(ended) == 41
    assert ended[0] is first
    home.connection_lost(None)
    visitor("another")
    assert len(ended) == 41, "there was room"
    assert home not in ended
