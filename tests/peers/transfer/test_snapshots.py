"""Snapshots as they are given: which there is, its chunks, and to how many at once."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from peers.errors import RemoteProtocolError
from peers.log.state import LogState
from peers.network import channel
from peers.network.channel import RefusalError, Serve
from peers.transfer import snapshots as snapshots_module
from peers.transfer.download import PULLS
from peers.transfer.snapshots import (
    SNAPSHOT,
    STRANGERS,
    Snapshot,
    SnapshotOffer,
    SnapshotRequest,
    serve_snapshots,
)
from peers.values.chunks import STATE_CHUNK, chunk_digests, digest_of_chunks
from peers.values.wire import Buffer, Reach, pack, unpack
from tests.peers.logs import LOG, RUN, first_log

STATE = b"".join(bytes([number]) * STATE_CHUNK for number in range(3)) + b"the rest"
HEAD = first_log().position.head


def frozen(state: bytes = STATE, log: LogState | None = None) -> Snapshot:
    digests = chunk_digests([state])
    return Snapshot((log or first_log()).last, digest_of_chunks(digests), digests, memoryview(state))


class FakeSource:
    """Has one snapshot, and knows that a and c are of its run."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot or frozen()
        self.least = -1

    def is_member(self, peer: str) -> bool:
        return peer in ("a", "c")

    async def newest(self, least: int) -> Snapshot:
        self.least = least
        if least > self.snapshot.index:
            raise RefusalError(f"outer step {least} is not here yet")
        return self.snapshot

    def held(self, head: bytes) -> Snapshot | None:
        return self.snapshot if head == LOG.at(self.snapshot.last).position.head else None


def request(first: int = 0, last: int = 0, head: bytes | None = HEAD, run: str = RUN, least: int = 0) -> bytes:
    return pack(SnapshotRequest(run=run, head=head, least=least, first=first, last=last))


def ask(least: int = 0) -> bytes:
    return request(head=None, least=least)


class Registry:
    """A transport that nobody is connected to."""

    def __init__(self) -> None:
        self.serve: dict[str, Serve] = {}
        self.giving_way: list[bool] = []

    def check_admitted(self, run_id: str, peer_id: str) -> None:
        """Everybody may come in."""

    async def on_pull(self, name: str, serve: Serve, gives_way: bool = False) -> None:
        self.serve[name] = serve
        self.giving_way.append(gives_way)

    def reach_of(self, peer_id: str) -> Reach | None:
        raise NotImplementedError

    async def pull(
        self, peer_id: str, name: str, header: bytes, max_bytes: int, timeout: float
    ) -> tuple[bytes, bytearray]:
        raise NotImplementedError


async def serving(source: FakeSource) -> Serve:
    registry = Registry()
    await serve_snapshots(registry, {RUN: source})
    assert registry.giving_way == [True], "a round comes first"
    return registry.serve[SNAPSHOT]


async def give(serve: Serve, packed: bytes, sender: str = "a") -> tuple[bytes, Buffer]:
    async with serve(sender, packed) as answer:
        return answer


def test_what_there_is() -> None:
    async def scenario() -> None:
        source = FakeSource()
        packed, digests = await give(await serving(source), ask(least=1))
        offer, snapshot = unpack(SnapshotOffer, packed), source.snapshot
        assert (offer.last, offer.bytes, offer.state_digest) == (snapshot.last, len(STATE), snapshot.state_digest)
        assert digests == b"".join(snapshot.chunk_digests)
        assert source.least == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 3), (3, 4), (0, 4)])
def test_chunks_are_served(first: int, last: int) -> None:
    async def scenario() -> None:
        answer, data = await give(await serving(FakeSource()), request(first, last))
        assert (answer, bytes(data)) == (b"", STATE[first * STATE_CHUNK : last * STATE_CHUNK])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"nonsense",
        request(0, 1)[:-1],
        request(0, 0),
        request(2, 1),
        request(0, 5),
        request(4, 5),
        request(0, 2**61),
    ],
)
def test_what_is_no_request_is_the_senders_mistake(packed: bytes) -> None:
    async def scenario() -> None:
        serve = await serving(FakeSource())
        with pytest.raises(RemoteProtocolError, match="peer a: "):
            await give(serve, packed)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (request(0, 1, head=bytes(32)), "not here any more"),
        (request(0, 1, run="another"), "run another is not here"),
        (request(head=None, run="another"), "run another is not here"),
        (ask(least=2), "outer step 2 is not here yet"),
    ],
)
def test_what_is_not_here_is_refused(packed: bytes, reason: str) -> None:
    async def scenario() -> None:
        serve = await serving(FakeSource())
        with pytest.raises(RefusalError, match=reason):
            await give(serve, packed)

    asyncio.run(scenario())


def test_a_snapshot_is_in_use_while_its_chunks_are_fetched_and_a_while_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        source = FakeSource()

        def is_in_use() -> bool:
            return source.snapshot.is_in_use(time.monotonic())

        serve = await serving(source)
        await give(serve, ask())
        assert is_in_use(), "a peer that asks fetches next, when there may be a newer one"
        monkeypatch.setattr(snapshots_module, "OFFERED", 0.0)
        assert not is_in_use(), "to ask is not to fetch"
        async with serve("a", request(0, 1)):
            assert is_in_use()
        assert is_in_use()
        monkeypatch.setattr(snapshots_module, "IN_USE", 0.0)
        assert not is_in_use()

    asyncio.run(scenario())


def test_strangers_do_not_keep_joiners_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PLACE_WAIT", 0.01)

    async def scenario() -> None:
        serve = await serving(FakeSource())
        async with AsyncExitStack() as stack:
            for number in range(STRANGERS):
                await stack.enter_async_context(serve(f"stranger{number}", request(0, 1)))
            with pytest.raises(RefusalError, match="too many"):
                await give(serve, request(0, 1), "one more")
            assert await give(serve, request(0, 1), "a")
        assert await give(serve, request(0, 1), "one more")

    asyncio.run(scenario())


def test_one_peer_has_its_share_and_no_more() -> None:
    async def scenario() -> None:
        serve = await serving(FakeSource())
        async with AsyncExitStack() as stack:
            for _ in range(PULLS):
                await stack.enter_async_context(serve("a", request(0, 1)))
            with pytest.raises(RefusalError, match="other parts"):
                await give(serve, request(0, 1), "a")
            assert await give(serve, request(0, 1), "c")

    asyncio.run(scenario())
