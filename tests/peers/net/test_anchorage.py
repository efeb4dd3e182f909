"""How nodes tell each other what the anchors of a run have signed."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from peers.errors import RemoteProtocolError
from peers.net.anchorage import Anchorage, AnchorsRequest
from peers.presence.heartbeat import Heartbeat
from peers.streams.channel import RefusalError
from peers.values.anchors import AnchoredHead, AnchoredHeads
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signing import IdentityKeys
from peers.values.wire import digest_of, pack
from tests.peers.net.told_network import Network
from tests.peers.presence.test_heartbeat import heartbeat

ORGANISER, FRIEND, STRANGER = (Identity.generate() for _ in range(3))
MANIFEST = SignedManifest.create(ORGANISER, "run", {})
RUN = MANIFEST.run_id


def head(index: int, text: bytes = b"ours", by: Identity = ORGANISER) -> AnchoredHead:
    return AnchoredHead.sign(RUN, index, digest_of(text), by.peer_id, IdentityKeys(by))


def packed(*heads: AnchoredHead) -> bytes:
    return pack(AnchoredHeads(heads=heads))


def anchorage(*heads: AnchoredHead) -> Anchorage:
    made = Anchorage()
    made.learn(MANIFEST)
    if heads:
        made.take(RUN, packed(*heads))
    return made


def beat_of(peer: Identity, anchors: bytes) -> Heartbeat:
    return heartbeat(peer=peer.peer_id, run=RUN, sequence=time.time_ns() // 1_000_000, anchors=anchors)


def test_what_each_knows_gets_to_both_and_is_kept() -> None:
    both, kept = (anchorage(head(3)), anchorage(head(5))), list[tuple[str, bytes]]()
    both[0].on_news = lambda run, known: kept.append((run, known))
    asyncio.run(both[0].exchange(Network("a", {"b": both[1]}), RUN, "b"))
    assert both[0].of(RUN) == both[1].of(RUN)
    assert [one.index for one in both[0].of(RUN).heads] == [3, 5]
    assert kept == [(RUN, both[0].of(RUN).packed)]
    assert not both[0].take(RUN, kept[0][1]), "nothing new"
    again = anchorage()
    again.take(*kept[0])
    assert again.of(RUN) == both[0].of(RUN), "as after a restart"


def test_learning_a_run_again_forgets_nothing() -> None:
    made = anchorage(head(3))
    made.learn(MANIFEST)
    assert made.of(RUN).heads == (head(3),)


def test_whoever_announces_many_runs_pushes_nothing_out() -> None:
    """Regression: after a thousand other runs nothing was known of what the anchors of this one had signed."""
    made = anchorage(head(3))
    for number in range(1100):
        made.learn(SignedManifest.create(STRANGER, f"other-{number}", {}))
    assert made.of(RUN).heads == (head(3),)
    made.forget(RUN)
    assert made.of(RUN).heads == ()


def test_what_no_anchor_has_signed_is_dropped() -> None:
    false = packed(head(9, by=STRANGER))
    one, other = anchorage(), anchorage()
    with pytest.raises(RemoteProtocolError, match="is no anchor of the run"):
        asyncio.run(one.answer("b", pack(AnchorsRequest(run=RUN, known=false))))
    network = Network("a", {"b": other})
    network.meddle = lambda answer: false
    with pytest.raises(RemoteProtocolError, match="is no anchor of the run"):
        asyncio.run(one.exchange(network, RUN, "b"))
    assert one.of(RUN).heads == ()


@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000)], ids=len)
def test_what_is_no_request(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        asyncio.run(anchorage().answer("b", payload))


def test_a_run_that_is_not_known() -> None:
    with pytest.raises(RefusalError, match="is known here"):
        asyncio.run(Anchorage().answer("b", pack(AnchorsRequest(run=RUN, known=b""))))
    assert not Anchorage().take(RUN, packed(head(3)))


def test_whoever_knows_something_else_is_asked_once_in_a_while() -> None:
    """A liar that claims to know more costs one question."""

    async def scenario() -> None:
        one, other = anchorage(), anchorage(head(3))
        liar, honest = beat_of(STRANGER, b"invented"), beat_of(FRIEND, other.of(RUN).digest)
        nothing = beat_of(ORGANISER, b"")
        network = Network("a", {STRANGER.peer_id: anchorage(), FRIEND.peer_id: other})
        for _ in range(20):
            one.catch_up(network, RUN, [liar, honest, nothing])
            await asyncio.sleep(0)
            if one._asking._task is not None:
                await one._asking._task
        assert one.of(RUN) == other.of(RUN)
        assert network.calls.count(STRANGER.peer_id) <= 1
        assert network.calls.count(FRIEND.peer_id) == 1
        assert ORGANISER.peer_id not in network.calls
        await one.close()

    asyncio.run(scenario())


def test_an_anchor_that_has_lied_is_named(caplog: pytest.LogCaptureFixture) -> None:
    made = anchorage(head(3))
    with caplog.at_level(logging.ERROR):
        made.take(RUN, packed(head(3, b"theirs")))
        made.take(RUN, packed(head(3, b"theirs")))
    [line] = [record.message for record in caplog.records]
    assert f"the anchor {ORGANISER.peer_id} has signed two heads at outer step 3" in line
