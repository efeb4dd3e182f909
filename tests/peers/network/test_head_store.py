"""How nodes learn what the archives of a run have signed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from peers.errors import RemoteProtocolError
from peers.network.channel import RefusalError
from peers.network.known_runs import KnownRuns, _HeadsRequest
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHead, SignedHeadsError, pack_heads, unpack_heads
from peers.values.wire import digest_of, pack
from tests.peers.network.told_network import Network
from tests.peers.presence.test_heartbeat import heartbeat

ORGANISER, STRANGER = Identity.generate(), Identity.generate()
MANIFEST = SignedManifest.create(ORGANISER, "run", {})
RUN = MANIFEST.run_id


def head(index: int, text: bytes = b"ours", by: Identity = ORGANISER) -> SignedHead:
    return SignedHead.sign(RUN, index, digest_of(text), by.peer_id, by)


def store(*heads: SignedHead) -> KnownRuns:
    made = KnownRuns()
    made.learn(MANIFEST)
    made.take_heads(RUN, heads)
    return made


def beat_of(peer: Identity, signed: SignedHead | None) -> Heartbeat:
    return Heartbeat.verify(heartbeat(peer=peer.peer_id, run=RUN, signed=signed).sign(peer), RUN)


def test_what_others_know_is_asked_for_and_kept() -> None:
    one, other, kept = store(head(3)), store(head(5)), list[tuple[str, bytes]]()
    one.on_heads = lambda run, known: kept.append((run, known))
    assert asyncio.run(one.ask_for_heads(Network("a", {"b": other.answer_heads}).call, RUN, ["b", "nobody"])) == 1
    assert [signed.index for signed in one.signed_heads_of(RUN).heads] == [3, 5]
    assert kept == [(RUN, pack_heads(one.signed_heads_of(RUN).heads))]
    one.take_heads(RUN, unpack_heads(kept[0][1]))
    assert len(kept) == 1, "nothing new"


def test_an_archives_heartbeat_tells_what_it_has_signed() -> None:
    made = store()
    made.hear_heads(RUN, [beat_of(STRANGER, None), beat_of(ORGANISER, head(3))])
    assert made.signed_heads_of(RUN).heads == (head(3),)
    made.hear_heads(RUN, [beat_of(STRANGER, head(9, by=STRANGER))])
    assert made.signed_heads_of(RUN).heads == (head(3),), "it is no archive of the run"


def test_learning_a_run_again_forgets_nothing() -> None:
    made = store(head(3))
    made.learn(MANIFEST)
    assert made.signed_heads_of(RUN).heads == (head(3),)


def test_whoever_announces_many_runs_pushes_nothing_out() -> None:
    """Regression: after a thousand other runs nothing was known of what the archives of this one had signed."""
    made = store(head(3))
    for number in range(1100):
        made.learn(SignedManifest.create(STRANGER, f"other-{number}", {}))
    assert made.signed_heads_of(RUN).heads == (head(3),)
    made.forget(RUN)
    assert made.signed_heads_of(RUN).heads == ()


@pytest.mark.parametrize("false", [b"x", pack_heads([head(9, by=STRANGER)])], ids=len)
def test_what_no_archive_has_signed_is_dropped(false: bytes) -> None:
    one, network = store(), Network("a", {"b": store().answer_heads})
    network.meddle = lambda answer: false
    assert asyncio.run(one.ask_for_heads(network.call, RUN, ["b"])) == 0
    assert one.signed_heads_of(RUN).heads == ()
    with pytest.raises(SignedHeadsError, match="is not an archive of the run"):
        one.take_heads(RUN, [head(9, by=STRANGER)])


@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000)], ids=len)
def test_what_is_no_request(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        asyncio.run(store().answer_heads("b", payload))


def test_a_run_that_is_not_known() -> None:
    with pytest.raises(RefusalError, match="is known here"):
        asyncio.run(KnownRuns().answer_heads("b", pack(_HeadsRequest(run=RUN))))
    made = KnownRuns()
    made.take_heads(RUN, [head(3)])
    assert made.signed_heads_of(RUN).heads == ()


def test_an_archive_that_has_lied_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    made = store(head(3))
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            made.take_heads(RUN, [head(3, b"theirs")])
    [line] = [record.message for record in caplog.records]
    assert f"the archive {ORGANISER.peer_id} is not believed from there on" in line
