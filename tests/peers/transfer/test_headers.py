"""Headers of past entries, as they are served and fetched."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from itertools import count

import pytest

from peers.errors import RemoteProtocolError
from peers.log.chain import STRETCH_LIMIT, Outcome, Stretch
from peers.log.header import Header
from peers.log.state import LogState
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError
from peers.transfer import lineage_fetch as headers_module
from peers.transfer.lineage_fetch import (
    HEADERS,
    PACKING_BURST,
    PACKING_SHARE,
    HeadersRequest,
    fetch_stretch,
    serve_headers,
)
from peers.values.wire import pack
from tests.peers.fakes import FakeTransport
from tests.peers.logs import LOG, PAYLOAD, RUN, chain_of, member, next_header
from tests.peers.network.test_throttle import now, simulate


def entries(count: int) -> list[Header]:
    log: LogState = LOG
    headers = []
    for index in range(count):
        headers.append(next_header(log, [member("a", 20 * index, 20 * index + 20)], PAYLOAD))
        log = log.append(headers[-1])
    return headers


ENTRIES = entries(5)


async def joined_to(past: list[Header]) -> FakeTransport:
    """The way to a donor with these headers."""
    me, donor = FakeTransport("me"), FakeTransport("a")
    await serve_headers(donor, {RUN: chain_of(past).stretch})
    assert donor.giving_way == {HEADERS}
    me.donors["a"] = donor
    return me


@pytest.mark.parametrize(("first", "last"), [(0, 5), (2, 3), (4, 100), (5, 6), (3, 2), (2**61, 2**61 + 1)])
def test_as_many_as_the_donor_has(first: int, last: int) -> None:
    async def scenario() -> None:
        me = await joined_to(ENTRIES)
        expected = ENTRIES[first:last]
        brief = await fetch_stretch(me, "a", RUN, first, last, is_whole=False)
        assert all(isinstance(told, Outcome) for told, _ in brief.contents)
        assert [told.previous for told, _ in brief.contents] == [header.previous for header in expected]
        whole = await fetch_stretch(me, "a", RUN, first, last, is_whole=True)
        assert [told for told, _ in whole.contents if isinstance(told, Header)] == (expected[:1] if first else [])
        assert len(whole.contents) == len(expected)

    asyncio.run(scenario())


def test_of_many_the_first_few() -> None:
    async def scenario() -> None:
        me, asked = await joined_to([]), []

        def past(first: int, last: int, is_whole: bool) -> Stretch:
            asked.append((first, last))
            return Stretch()

        await serve_headers(me.donors["a"], {RUN: past})
        await fetch_stretch(me, "a", RUN, 3, 10**6, is_whole=True)
        assert asked == [(3, 3 + STRETCH_LIMIT)]

    asyncio.run(scenario())


def test_who_asks_again_and_again_is_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing an answer takes time, here a second: it is asked for with a few bytes, and need not be read."""
    seconds, clock = count(), 0.0
    monkeypatch.setattr(headers_module, "thread_time", lambda: float(next(seconds)))
    monkeypatch.setattr(headers_module, "now", lambda: clock)

    async def answered(me: FakeTransport, times: int) -> int:
        """Return how often the donor has answered."""
        good = 0
        for _ in range(times):
            with suppress(PeerRefusedError):
                await fetch_stretch(me, "a", RUN, 0, 5, is_whole=False)
                good += 1
        return good

    async def scenario() -> None:
        nonlocal clock
        me = await joined_to(ENTRIES)
        assert await answered(me, 2 * int(PACKING_BURST)) == PACKING_BURST
        clock = 1.0 / PACKING_SHARE
        assert await answered(me, 2) == 1

    asyncio.run(scenario())


def test_another_run_is_refused() -> None:
    async def scenario() -> None:
        me = await joined_to(ENTRIES)
        with pytest.raises(PeerRefusedError, match="run another is not here"):
            await fetch_stretch(me, "a", "another", 0, 1, is_whole=False)
        with pytest.raises(PeerUnreachableError):
            await fetch_stretch(me, "nobody", RUN, 0, 1, is_whole=False)

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"", b"nonsense", pack(ENTRIES[0])])
def test_what_are_no_headers_is_the_donors_mistake(answer: bytes) -> None:
    async def other(name: str, header: bytes, data: bytearray) -> bytearray:
        return bytearray(answer)

    async def scenario() -> None:
        me = await joined_to(ENTRIES)
        me.donors["a"].meddle = other
        with pytest.raises(RemoteProtocolError, match="peer a: "):
            await fetch_stretch(me, "a", RUN, 0, 1, is_whole=False)

    asyncio.run(scenario())


def test_a_donor_that_stalls_costs_a_minute_and_not_an_hour() -> None:
    async def stall(name: str, header: bytes, data: bytearray) -> bytearray:
        await asyncio.Event().wait()
        return data

    async def scenario() -> None:
        me = await joined_to(ENTRIES)
        me.donors["a"].meddle = stall
        with pytest.raises(PeerUnreachableError, match="no answer in time"):
            await fetch_stretch(me, "a", RUN, 0, 1, is_whole=False)
        assert now() < 60.0

    simulate(scenario())


REQUEST = pack(HeadersRequest(run=RUN, first=0, last=1, is_whole=False))


@pytest.mark.parametrize("packed", [b"", b"nonsense", REQUEST[:-1]])
def test_what_is_no_request_is_the_senders_mistake(packed: bytes) -> None:
    async def scenario() -> None:
        me = await joined_to(ENTRIES)
        with pytest.raises(RemoteProtocolError, match="peer z: "):
            async with me.donors["a"].serve[HEADERS]("z", packed):
                pytest.fail("it was served")

    asyncio.run(scenario())


def test_one_peer_is_served_one_at_a_time() -> None:
    assert headers_module.PULLS == 1

    async def scenario() -> None:
        serve = (await joined_to(ENTRIES)).donors["a"].serve[HEADERS]
        async with serve("greedy", REQUEST):
            with pytest.raises(RefusalError):
                async with serve("greedy", REQUEST):
                    pytest.fail("it was served")
            async with serve("another", REQUEST):
                pass

    asyncio.run(scenario())


def test_strangers_take_no_place_of_a_members() -> None:
    """Regression: four strangers that were slow to read kept all members from fetching headers."""

    async def scenario() -> None:
        donor = FakeTransport("a")
        members = [f"member{number}" for number in range(headers_module.READERS)]
        await serve_headers(donor, {RUN: chain_of(ENTRIES).stretch}, lambda run, peer: run == RUN and peer in members)
        serve = donor.serve[HEADERS]
        async with AsyncExitStack() as reading:
            for number in range(headers_module.STRANGERS):
                await reading.enter_async_context(serve(f"stranger{number}", REQUEST))
            for name in members:
                await reading.enter_async_context(serve(name, REQUEST))
            with pytest.raises(RefusalError, match="too many"):
                await reading.enter_async_context(serve("another stranger", REQUEST))
        async with serve("another stranger", REQUEST):
            pass

    simulate(scenario())
