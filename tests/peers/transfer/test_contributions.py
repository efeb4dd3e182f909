"""What members of a round show each other of their contributions after it: a chunk, and its path to a commitment."""

from __future__ import annotations

import asyncio

import pytest

from peers.messages.commitment import leads_to
from peers.network.channel import PeerRefusedError, PeerUnreachableError
from peers.transfer.averages import CONTRIBUTION, ContributionRequest, ask_for_contributions, serve_contributions
from peers.transfer.buffers import PayloadBuffers, inspection, offer
from peers.values.chunks import Sum
from peers.values.wire import digest_of, pack
from tests.peers.fakes import BLOCK, FakeTransport, FakeWorkload
from tests.peers.rounds import SIZE

RUN = "tiny"
CHUNK = 4


class Circle:
    """The members a, b and c of a round, which have contributed bytes of 10, 20 and 30."""

    def __init__(self) -> None:
        self.network = {name: FakeTransport(name) for name in "abc"}
        self.buffers = {name: PayloadBuffers(FakeWorkload()) for name in "abc"}
        self.roots = {name: self.contribute(name, 10 * place + 10) for place, name in enumerate("abc")}
        self.network["b"].donors = self.network

    def contribute(self, name: str, byte: int) -> Sum:
        buffers = self.buffers[name]
        return offer(bytes([byte]) * SIZE.bytes, buffers, inspection(FakeWorkload().squared_norm, buffers))

    async def serve(self) -> None:
        for name, transport in self.network.items():
            if name in self.buffers:
                await serve_contributions(transport, RUN, [self.buffers[name]], lambda fragment, peer: peer in "abc")

    def shown(self, peers: str) -> list[int | None]:
        """The bytes that b gets to see, of members that keep to what they have committed to."""

        async def scenario() -> list[int | None]:
            await self.serve()
            answers = await ask_for_contributions(
                self.network["b"], RUN, "b", self.buffers["b"], dict.fromkeys(peers, 0), CHUNK
            )
            bytes_shown: list[int | None] = []
            for peer, answer in zip(peers, answers, strict=True):
                if answer is not None:
                    proof, blocks = answer
                    assert leads_to(self.roots[peer], CHUNK, SIZE.chunks, digest_of(blocks), proof)
                    assert len(blocks) == BLOCK
                bytes_shown.append(answer[1][0] if answer else None)
            return bytes_shown

        return asyncio.run(scenario())

    def ask(self, sender: str, run: str = RUN, chunk: int = 0) -> None:
        asking = self.network.setdefault(sender, FakeTransport(sender))
        asking.donors = self.network

        async def scenario() -> None:
            await self.serve()
            request = pack(ContributionRequest(run=run, fragment=0, chunk=chunk))
            await asking.pull("a", CONTRIBUTION, request, BLOCK, 1.0)

        asyncio.run(scenario())


def test_members_show_what_they_have_contributed_and_how_it_follows_from_their_commitment() -> None:
    assert Circle().shown("abc") == [10, 20, 30]
    assert Circle().shown("c") == [30]


def test_a_member_that_is_gone_shows_nothing() -> None:
    circle = Circle()
    circle.network["b"].donors = {"a": circle.network["a"]}
    assert circle.shown("abc") == [10, 20, None]


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_member_that_has_contributed_nothing_shows_nothing(name: str) -> None:
    circle = Circle()
    circle.buffers[name].tree = None
    assert circle.shown(name) == [None]


@pytest.mark.parametrize(
    ("sender", "run", "chunk", "reason"),
    [
        ("z", RUN, 0, "no round with you"),
        ("b", "another", 0, "no round with you"),
        ("b", RUN, SIZE.chunks, f"no chunk {SIZE.chunks}"),
    ],
)
def test_nothing_is_shown_to_others(sender: str, run: str, chunk: int, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        Circle().ask(sender, run, chunk)


def test_a_peer_says_that_it_has_contributed_nothing() -> None:
    circle = Circle()
    circle.buffers["a"].tree = None
    with pytest.raises((PeerRefusedError, PeerUnreachableError), match="contributed"):
        circle.ask("b")
