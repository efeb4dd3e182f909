"""Admission to runs at one node, and how lists of revoked tickets get around."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

import msgpack
import pytest

from peers.errors import RemoteProtocolError
from peers.network.channel import RefusalError
from peers.network.dht_storage import _key_digest, _record_is_valid, heartbeats_key, manifest_key
from peers.network.known_runs import STRANGERS_LIMIT, Admissions, _RevocationsRequest
from peers.presence.heartbeat import Heartbeat
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.tickets import Revocations, Ticket
from peers.values.wire import pack
from tests.peers.network.told_network import Network
from tests.peers.presence.test_heartbeat import heartbeat

ORGANISER, FRIEND, STRANGER = (Identity.generate() for _ in range(3))
BY_INVITATION = SignedManifest.create(ORGANISER, "guests", {"admission": {"mode": "invite"}})
OPEN = SignedManifest.create(ORGANISER, "all", {"admission": {"mode": "open"}})
RUN = BY_INVITATION.run_id
TICKET = Ticket.give(RUN, ORGANISER, 4_000_000_000, to=FRIEND.peer_id)
LIST = Revocations.sign(RUN, 1, (TICKET.id,), ORGANISER)


def beat_of(peer: Identity, run: str = RUN, ticket: bytes = b"", revocations: int = 0) -> Heartbeat:
    sequence = time.time_ns() // 1_000_000
    return heartbeat(peer=peer.peer_id, run=run, sequence=sequence, ticket=ticket, revocations=revocations)


def admissions(*manifests: SignedManifest) -> Admissions:
    made = Admissions()
    for manifest in manifests:
        made.learn(manifest)
    return made


def test_a_run_by_invitation_says_so() -> None:
    assert BY_INVITATION.is_by_invitation
    assert not OPEN.is_by_invitation
    assert not SignedManifest.create(ORGANISER, "x", {"admission": "invite"}).is_by_invitation
    assert not SignedManifest.create(ORGANISER, "x", {}).is_by_invitation


def test_only_who_was_seen_with_a_ticket_may_come_in() -> None:
    made, now = admissions(BY_INVITATION, OPEN), time.time()
    assert made.admits(beat_of(FRIEND, ticket=TICKET.shown_by(FRIEND.peer_id)), now)
    assert not made.admits(beat_of(STRANGER, ticket=TICKET.shown_by(FRIEND.peer_id)), now)
    made.check(RUN, FRIEND.peer_id)
    with pytest.raises(RefusalError, match=r"is by invitation: it has shown no ticket here\. Ask the person"):
        made.check(RUN, STRANGER.peer_id)
    for run in (OPEN.run_id, "unknown-" + "a" * 32):
        made.check(run, STRANGER.peer_id)
        assert made.admits(beat_of(STRANGER, run), now)


def test_the_archives_that_the_manifest_names_need_no_ticket() -> None:
    """Regression: a run's own archive kept nothing without a ticket, which names the run that names it."""
    content = {"admission": {"mode": "invite"}, "archives": [FRIEND.peer_id]}
    manifest = SignedManifest.create(ORGANISER, "guests", content)
    made, now = admissions(manifest), time.time()
    for peer, is_named in ((FRIEND, True), (ORGANISER, True), (STRANGER, False)):
        assert made.admits(beat_of(peer, manifest.run_id), now) == is_named
        with nullcontext() if is_named else pytest.raises(RefusalError):
            made.check(manifest.run_id, peer.peer_id)


class TestRecords:
    """What the DHT's nodes keep."""

    def keeps(self, made: Admissions, peer: Identity, ticket: bytes = b"") -> bool:
        said = beat_of(peer, ticket=ticket)
        place, subkey = _key_digest(heartbeats_key(RUN)), msgpack.packb(peer.peer_id)
        value = msgpack.packb(said.sign(peer))
        return _record_is_valid(place, subkey, value, said.expires, time.time(), made)

    def test_a_node_with_the_manifest_keeps_only_who_is_admitted(self) -> None:
        assert self.keeps(admissions(BY_INVITATION), FRIEND, TICKET.shown_by(FRIEND.peer_id))
        assert not self.keeps(admissions(BY_INVITATION), STRANGER)
        assert not self.keeps(admissions(BY_INVITATION), STRANGER, TICKET.shown_by(FRIEND.peer_id))
        assert self.keeps(admissions(), STRANGER), "it can't know"

    def test_a_node_learns_from_the_manifests_that_it_keeps(self) -> None:
        made, value = admissions(), msgpack.packb(BY_INVITATION.pack())
        elsewhere = _key_digest(manifest_key(OPEN.run_id))
        assert not _record_is_valid(elsewhere, msgpack.packb(None), value, 1.0, time.time(), made)
        assert self.keeps(made, STRANGER)
        place = _key_digest(manifest_key(RUN))
        assert _record_is_valid(place, msgpack.packb(None), value, 1.0, time.time(), made)
        assert not self.keeps(made, STRANGER)

    def test_a_node_without_the_manifest_looks_for_it(self) -> None:
        async def scenario() -> None:
            made, sought = admissions(), list[str]()

            async def find(run: str) -> SignedManifest | None:
                sought.append(run)
                return {RUN: BY_INVITATION, OPEN.run_id: OPEN}.get(run)

            made.find = find
            for run in (RUN, OPEN.run_id, "unknown-" + "a" * 32) * 3:
                made.admits(beat_of(STRANGER, run), time.time())
                for _ in range(3):
                    await asyncio.sleep(0)
            assert sought == [RUN, OPEN.run_id, "unknown-" + "a" * 32], "each once in a while"
            assert not self.keeps(made, STRANGER)
            assert self.keeps(made, FRIEND, TICKET.shown_by(FRIEND.peer_id))
            await made.close()

        asyncio.run(scenario())

    def test_runs_of_others_are_forgotten_and_ours_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("peers.network.known_runs.STRANGERS_LIMIT", 2)
        assert STRANGERS_LIMIT > 2
        made, sought = admissions(BY_INVITATION, OPEN), list[str]()
        made.find = sought.append  # type: ignore[assignment]
        others = [SignedManifest.create(ORGANISER, f"x{one}", {"admission": {"mode": "invite"}}) for one in range(4)]
        for other in others:
            made.learn(other, is_ours=False)
        assert [made.of(other.run_id) is not None for other in others] == [False, False, True, True]
        assert made.of(RUN) is not None
        assert made.admits(beat_of(STRANGER, OPEN.run_id), time.time())
        assert not sought, "regression: an open run of ours was forgotten, and then searched for"


class TestRevocations:
    def test_the_newer_list_gets_to_both(self) -> None:
        for knows in (0, 1):
            both = admissions(BY_INVITATION), admissions(BY_INVITATION)
            kept: list[tuple[str, bytes]] = []
            both[knows].of(RUN).revoke(pack(LIST))  # type: ignore[union-attr]
            both[1 - knows].on_revoked = lambda run, packed, kept=kept: kept.append((run, packed))  # type: ignore[misc]
            asyncio.run(both[0].exchange(Network("a", {"b": both[1].answer}).call, RUN, "b"))
            assert [one.of(RUN).number for one in both] == [1, 1]  # type: ignore[union-attr]
            assert kept == [(RUN, pack(LIST))]

    def test_false_lists_are_dropped(self) -> None:
        false = pack(Revocations.sign(RUN, 9, (), STRANGER))
        one, other = admissions(BY_INVITATION), admissions(BY_INVITATION)
        with pytest.raises(RemoteProtocolError, match="not signed by its organiser"):
            asyncio.run(one.answer("b", pack(_RevocationsRequest(run=RUN, known=false))))
        network = Network("a", {"b": other.answer})
        network.meddle = lambda answer: false
        with pytest.raises(RemoteProtocolError, match="not signed by its organiser"):
            asyncio.run(one.exchange(network.call, RUN, "b"))
        assert one.of(RUN).number == 0  # type: ignore[union-attr]

    @pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000)], ids=len)
    def test_what_is_no_request(self, payload: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            asyncio.run(admissions(BY_INVITATION).answer("b", payload))

    def test_a_run_that_is_not_known(self) -> None:
        with pytest.raises(RefusalError, match="is known here"):
            asyncio.run(admissions(OPEN).answer("b", pack(_RevocationsRequest(run=RUN, known=b""))))

    def test_whoever_knows_of_later_ones_is_asked_once(self) -> None:
        """A liar that claims to have a later list costs one question in a while."""

        async def scenario() -> None:
            one, other = admissions(BY_INVITATION), admissions(BY_INVITATION)
            other.of(RUN).revoke(pack(LIST))  # type: ignore[union-attr]
            liar, honest = beat_of(STRANGER, revocations=99), beat_of(FRIEND, revocations=1)
            network = Network("a", {STRANGER.peer_id: admissions(BY_INVITATION).answer, FRIEND.peer_id: other.answer})
            for _ in range(20):
                one.catch_up(network.call, RUN, [liar, honest])
                await asyncio.sleep(0)
                if one._asking is not None:
                    await one._asking
            assert one.of(RUN).number == 1  # type: ignore[union-attr]
            assert network.calls.count(STRANGER.peer_id) <= 1
            assert network.calls.count(FRIEND.peer_id) == 1
            await one.close()

        asyncio.run(scenario())
