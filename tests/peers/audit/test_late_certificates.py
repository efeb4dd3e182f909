"""Certificates of both branches of a fork meet: a peer reads those of decided positions, and shows its own when it
yields."""

from __future__ import annotations

from peers.log.certificate import Phase
from peers.log.lineage import Branch, Lineage, Walk
from peers.log.state import LogState
from peers.messages.messages import Certified
from peers.messages.packing import Packer
from peers.presence.heartbeat import PeerState
from peers.protocol.effects import Effect, FetchLineage, FetchSnapshot, Note, Send
from peers.protocol.events import HeartbeatsSeen, LineageSeen, Received
from peers.protocol.peer import Peer
from tests.peers.audit.statements import ABC, PAYLOADS, A, B, certified, choice, verify
from tests.peers.heartbeats import beat
from tests.peers.logs import SETTINGS, STATE
from tests.simulator.simulated_keys import SimulatedKeys

OURS = certified(B, choice(B, 2, Phase.COMMIT), "bc")
THEIRS = certified(A, choice(A, 2, Phase.COMMIT), "abc")
"""b and c have signed both, in one ballot."""


def peer_with(entry: Certified, name: str = "d") -> Peer:
    """Return a peer whose log has this entry after those that all have."""
    lineage = Lineage(ABC)
    lineage.append(entry.header, ABC.append(entry.header), entry.certificate)
    return Peer(name, SETTINGS, PAYLOADS, STATE, 0.0, 0, SimulatedKeys(name), lineage)


def branch(entry: Certified) -> Branch:
    walk = Walk(ABC, verify)
    walk.take(entry.header, entry.certificate)
    return walk.branch()


def convictions(effects: list[Effect]) -> list[str]:
    notes = [effect.text for effect in effects if isinstance(effect, Note)]
    return [text.split()[0] for text in notes if "proven to lie" in text]


def test_r9_the_certificate_of_another_branch_convicts_those_who_signed_ours_too() -> None:
    peer = peer_with(OURS)
    packed = Packer(peer_with(THEIRS)).pack(THEIRS)
    message = Packer(peer).unpack("a", packed)
    assert message == THEIRS, "a certificate is read at recent positions"
    assert convictions(peer.handle(Received("a", message), 1.0)) == ["b", "c"]
    assert not convictions(peer.handle(Received("a", message), 2.0)), "once"


def test_r9_the_certificate_of_the_entry_that_is_here_convicts_nobody() -> None:
    peer = peer_with(OURS)
    assert not peer.handle(Received("a", OURS), 1.0)
    later = certified(B, choice(B, 3, Phase.COMMIT), "bc")
    assert not convictions(peer.handle(Received("a", later), 2.0))


def further(log: LogState) -> HeartbeatsSeen:
    """The others are on another branch, with more tokens behind it."""
    said = [beat(name, log, PeerState.TRAINING, 1, lineage_tokens=2**40, incarnation=7) for name in "abc"]
    return HeartbeatsSeen(tuple(said))


def test_r9_a_peer_that_yields_shows_the_donor_its_own_certificate() -> None:
    peer = peer_with(OURS)
    (fetch,) = [one for one in peer.handle(further(ABC.append(A)), 1.0) if isinstance(one, FetchLineage)]
    seen = LineageSeen(fetch.donor, branch(THEIRS), branch(OURS))
    effects = peer.handle(seen, 2.0)
    assert Send(fetch.donor, OURS) in effects
    assert any(isinstance(effect, FetchSnapshot) for effect in effects)


def test_r9_a_peer_that_stays_shows_nothing() -> None:
    peer = peer_with(THEIRS)
    (fetch,) = [one for one in peer.handle(further(ABC.append(B)), 1.0) if isinstance(one, FetchLineage)]
    effects = peer.handle(LineageSeen(fetch.donor, branch(OURS), branch(THEIRS)), 2.0)
    assert not any(isinstance(effect, Send) and isinstance(effect.message, Certified) for effect in effects)
