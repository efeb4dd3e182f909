"""The driver around one peer, with a transport and a training side that do what the test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from peers import driver as driver_module
from peers.bulk import Bulk
from peers.driver import Driver, Transport
from peers.errors import DilocoPeerError, LocalProtocolError
from peers.events import ContributionArrived, OpenRound, Received
from peers.identity import Identity
from peers.messages import Abort, Accuse, unpack_message
from peers.states import State
from peers.streams import Buffer
from tests.peers.builders import RUN, SETTINGS, STATE, Rig, attempt, ready
from tests.peers.test_bulk import FakeTransport, FakeWorkload
from tests.peers.test_peer import at_second


class SlowTransport(FakeTransport):
    """Pushes never end; messages arrive unless they are said to be too large."""

    addresses = ()

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, Any]] = []
        self.pushing: set[str] = set()
        self.too_large = False

    async def push(self, peer_id: str, name: str, header: bytes, data: Buffer, timeout: float) -> None:
        self.pushing.add(peer_id)
        try:
            await asyncio.Event().wait()
        finally:
            self.pushing.discard(peer_id)

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if self.too_large:
            raise LocalProtocolError("a message of 2000000 bytes exceeds the limit of 1048576")
        self.sent.append((peer_id, unpack_message(RUN, payload)))
        return b""


class FussyWorkload(FakeWorkload):
    """Quantizes at once; cannot average what contains the block of a spoiler."""

    async def contribution(self) -> bytes:
        return bytes(56)

    async def reduce(self, contributions: Sequence[tuple[bytes, int]], first_block: int) -> bytes:
        if any(blocks.startswith(b"spoilt") for blocks, _ in contributions):
            raise DilocoPeerError("the weighted values overflow")
        return bytes(len(contributions[0][0]))


class DriverOf(Driver):
    """Runs the peer of a rig, on the rig's clock."""

    def __init__(self, rig: Rig, transport: SlowTransport) -> None:
        workload = FussyWorkload()
        super().__init__(Identity.generate(), cast(Transport, transport), workload, SETTINGS, STATE)
        self.peer = rig.peer
        self._bulk = Bulk(rig.peer, transport, workload, self)

    def carry_on(self, rig: Rig) -> None:
        """Begin what the rig's last event asked for."""
        for effect in rig.effects:
            if isinstance(effect, OpenRound):
                self._carry_out(effect)


@asynccontextmanager
async def driving(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[DriverOf, SlowTransport]]:
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=lambda: rig.now))
    transport = SlowTransport()
    driver = DriverOf(rig, transport)
    async with asyncio.TaskGroup() as driver._tasks:
        driver.carry_on(rig)
        yield driver, transport
        for task in list(driver._running):
            task.cancel()


async def quiet() -> None:
    """Let everything go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def dropped(what: str) -> float:
    return REGISTRY.get_sample_value("diloco_peer_dropped_total", {"what": what}) or 0.0


def test_a_contribution_that_has_no_average_costs_its_sender_the_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: blocks with scales that only the sum could not bear ended every peer that reduced them."""
    before = dropped("contribution")

    async def scenario() -> None:
        rig = at_second().trained().averaging()
        async with driving(rig, monkeypatch) as (driver, transport):
            await quiet()
            at = attempt(rig.peer.log)
            current = driver._bulk.buffers.current(at)
            assert current is not None
            current.contributions |= {"a": bytes(16), "c": b"spoilt" + bytes(10)}
            driver.handle(ContributionArrived(at, "a"))
            driver.handle(ContributionArrived(at, "c"))
            await quiet()
            accused = [(to, message.accused) for to, message in transport.sent if isinstance(message, Accuse)]
            assert accused == [("a", "c")]
            assert rig.is_in(State.AVERAGING)

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert dropped("contribution") == before + 1
    assert "dropped a contribution of c: the weighted values overflow" in caplog.text


def test_our_own_unusable_numbers_are_our_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = at_second().trained().averaging()
        async with driving(rig, monkeypatch) as (driver, _):
            await quiet()
            at = attempt(rig.peer.log)
            current = driver._bulk.buffers.current(at)
            assert current is not None
            current.own = b"spoilt! " * 7
            current.contributions |= {"a": bytes(16), "c": bytes(16)}
            driver.handle(ContributionArrived(at, "a"))
            driver.handle(ContributionArrived(at, "c"))
            await quiet()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    assert "overflow" in str(caught.value.exceptions[0])


def test_pushes_end_with_their_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they went on beside those of the next attempt, for up to an hour."""

    async def scenario() -> None:
        rig = at_second().trained().averaging()
        async with driving(rig, monkeypatch) as (driver, transport):
            await quiet()
            assert transport.pushing == {"a", "c"}
            driver.handle(Received("a", Abort(attempt=attempt(rig.peer.log), reason="")))
            assert rig.is_in(State.READY)
            await quiet()
            assert transport.pushing == set()
            driver.handle(Received("a", rig.begin(2)))
            await quiet()
            assert transport.pushing == {"a", "c"}
            assert len(driver._pushes) == 2

    asyncio.run(scenario())


def test_a_message_too_large_to_be_sent_is_named_and_nothing_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: what others had put into the log could make our messages too large, which ended us."""

    async def scenario() -> None:
        rig = at_second().trained()
        async with driving(rig, monkeypatch) as (driver, transport):
            transport.too_large = True
            driver.handle(Received("c", ready(rig.peer.log, "c", last_attempt=5)))
            driver.handle(Received("a", ready(rig.peer.log, "a", last_attempt=6)))
            await quiet()
            assert rig.is_in(State.READY)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "cannot tell c: a message of 2000000 bytes exceeds" in caplog.text
