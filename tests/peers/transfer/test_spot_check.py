"""Whoever has been in a round makes one of its averages again, of what the others show."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from peers.network.channel import PeerRefusedError, PeerUnreachableError
from peers.protocol.contributions import Contributions
from peers.protocol.events import AverageRefuted
from peers.protocol.exchange import Exchange
from peers.protocol.signed_averages import Origin
from peers.transfer.averages import (
    ASKED,
    CONTRIBUTION,
    MOST,
    ContributionRequest,
    SpotCheck,
    asking,
    serve_contributions,
)
from peers.transfer.buffers import PayloadBuffers, inspection, offer
from peers.values.chunks import Sum
from peers.values.wire import digest_of, pack
from peers.values.workload import BadBlocksError, Reduction
from tests.peers.builders import RUN, SIZE, TOKENS, commitment
from tests.peers.fakes import BLOCK, FakeTransport, FakeWorkload
from tests.peers.protocol.test_exchange import AT, round_among
from tests.simulator.simulated_keys import SimulatedKeys

CHUNK = 4


class Codec(FakeWorkload):
    """Of its averages each byte is the mean of the first ones."""

    async def reduce(self, reduction: Reduction) -> bytes:
        total = sum(blocks[0] * weight for blocks, weight in reduction.contributions)
        return bytes([int(total / (reduction.tokens or 1))]) * BLOCK


class Chance(random.Random):
    """Takes the first, and is never lucky or always."""

    def __init__(self, number: float = 0.0) -> None:
        self.number = number

    def random(self) -> float:
        return self.number

    def choice(self, seq: Sequence[object]) -> object:  # type: ignore[override]
        return seq[0]


class Circle:
    """The members of a round, which have contributed bytes of 10, 20, 30 and so on; a gives the chunk 4 to b."""

    def __init__(self, names: str = "abc", clipped: dict[str, float] | None = None) -> None:
        self.names = names
        self.network = {name: FakeTransport(name) for name in names}
        self.buffers = {name: PayloadBuffers(FakeWorkload()) for name in names}
        roots = {name: self.contribute(name, 10 * place + 10) for place, name in enumerate(names)}
        said = {name: commitment(name, 0, AT.position, root) for name, root in roots.items()}
        contributions = Contributions(SIZE.chunks, said, clipped or {})
        self.exchange = Exchange("b", AT, round_among(names), contributions, SimulatedKeys("b"))
        self.network["b"].donors = self.network

    def contribute(self, name: str, byte: int) -> Sum:
        buffers = self.buffers[name]
        return offer(bytes([byte]) * SIZE.bytes, buffers, inspection(FakeWorkload().squared_norm, buffers))

    def averaged(self, byte: int, absent: tuple[str, ...] = ()) -> None:
        """a has signed that this is what came out."""
        origin = Origin(reducer="a", signature=bytes(64))
        self.exchange.averages.keep(CHUNK, digest_of(bytes([byte]) * BLOCK), absent, origin)

    def check(self, chance: float = 0.0) -> AverageRefuted | None:
        me = self.network["b"]

        async def scenario() -> AverageRefuted | None:
            for name in self.names:
                await serve_contributions(
                    self.network[name], RUN, [self.buffers[name]], lambda fragment, peer: peer in self.names
                )
            spot_check = SpotCheck(asking(me, RUN), Codec().reduce, [self.buffers["b"]], "b", Chance(chance))
            return await spot_check.check(self.exchange)

        return asyncio.run(scenario())

    @property
    def asked(self) -> list[str]:
        return [peer for peer, _, _ in self.network["b"].pulls]


@pytest.mark.parametrize(("byte", "refuted"), [(20, None), (21, AverageRefuted(AT, "a", CHUNK))])
def test_an_average_is_what_it_is_made_of_or_refuted(byte: int, refuted: AverageRefuted | None) -> None:
    circle = Circle()
    circle.averaged(byte)
    assert circle.check() == refuted
    assert circle.asked == ["a", "c"]
    assert {name for _, name, _ in circle.network["b"].pulls} == {CONTRIBUTION}


def test_of_whom_an_average_has_no_blocks_none_are_asked_for() -> None:
    circle = Circle()
    circle.averaged(15, absent=("c",))
    assert circle.check() is None
    assert circle.asked == ["a"]


def test_whoever_is_clipped_counts_less() -> None:
    circle = Circle(clipped={"c": 0.5})
    circle.averaged((10 * TOKENS + 20 * TOKENS + 15 * TOKENS) // (3 * TOKENS))
    assert circle.check() is None


def train_again(circle: Circle) -> None:
    circle.contribute("c", 99)


def own_work(circle: Circle) -> None:
    circle.contribute("b", 99)


@pytest.mark.parametrize("happens", [train_again, own_work])
def test_where_somebody_shows_nothing_nothing_is_shown(happens: Callable[[Circle], object]) -> None:
    """It may have trained again: what it has now is not what it committed to then."""
    circle = Circle()
    circle.averaged(21)
    happens(circle)
    assert circle.check() is None


def test_whoever_is_gone_shows_nothing() -> None:
    circle = Circle()
    circle.averaged(21)
    circle.network["b"].donors = {"a": circle.network["a"]}
    assert circle.check() is None


def test_blocks_that_have_no_average_are_for_the_reducer_to_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(codec: Codec, reduction: Reduction) -> bytes:
        raise BadBlocksError("overflow")

    monkeypatch.setattr(Codec, "reduce", fail)
    circle = Circle()
    circle.averaged(21)
    assert circle.check() is None


def test_large_rounds_are_looked_at_now_and_then() -> None:
    """Else a thousand members would ask a thousand others for a chunk each."""
    names = "".join(chr(ord("a") + place) for place in range(ASKED + 4))
    circle = Circle(names)
    circle.averaged(0)
    assert circle.check(chance=0.9) is None
    assert circle.asked == []
    assert circle.check(chance=0.1) is not None
    assert len(circle.asked) == len(names) - 1


def test_rounds_too_large_for_memory_and_those_of_which_one_knows_nothing_are_not_looked_at() -> None:
    circle = Circle()
    assert circle.check() is None, "all averages are our own"
    circle.averaged(21)
    many = {str(number): circle.exchange.contributions.commitments["a"] for number in range(MOST + 1)}
    for said in (many, {}):
        circle.exchange.contributions = Contributions(SIZE.chunks, said)
        assert circle.check() is None
    assert circle.asked == []


@pytest.mark.parametrize(
    ("who", "run", "chunk", "reason"),
    [
        ("z", RUN, 0, "no round with you"),
        ("b", "another", 0, "no round with you"),
        ("b", RUN, SIZE.chunks, f"no chunk {SIZE.chunks}"),
    ],
)
def test_who_is_shown_something(who: str, run: str, chunk: int, reason: str) -> None:
    circle = Circle()
    asking = circle.network.setdefault(who, FakeTransport(who))
    asking.donors = circle.network

    async def scenario() -> None:
        await serve_contributions(circle.network["a"], RUN, [circle.buffers["a"]], lambda fragment, peer: peer in "abc")
        await asking.pull("a", CONTRIBUTION, pack(ContributionRequest(run=run, fragment=0, chunk=chunk)), BLOCK, 1.0)

    with pytest.raises(Exception, match=reason):
        asyncio.run(scenario())


def test_whoever_has_contributed_nothing_shows_nothing() -> None:
    circle = Circle()
    circle.buffers["a"].tree = None

    async def scenario() -> None:
        await serve_contributions(circle.network["a"], RUN, [circle.buffers["a"]], lambda fragment, peer: True)
        request = pack(ContributionRequest(run=RUN, fragment=0, chunk=0))
        await circle.network["b"].pull("a", CONTRIBUTION, request, BLOCK, 1.0)

    with pytest.raises((PeerRefusedError, PeerUnreachableError), match="contributed"):
        asyncio.run(scenario())
