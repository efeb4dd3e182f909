"""Beats: messages by which a run's peers show each other that they are live (R20). This module does no I/O itself.

Every two seconds a peer sends each other one a *beat* (calls.py). It has some 60 bytes and no signature, since the link
proves its sender. A peer's signed heartbeat, which says all the rest, goes the same way when it has changed, and now
and then. The answer shows whether the other peer needs it. So a stranger's beat costs nothing: the answer asks for the
stranger's signed heartbeat.

Each peer believes only what it hears itself. It hands out the signed heartbeats of others to newcomers, and to visitors
that only look, so that they know which peers to ask. These are no signs of life.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from peers.errors import RemoteProtocolError
from peers.presence.admission import RunAdmission, refused
from peers.presence.allowances import STRANGER, Allowance, Allowances
from peers.presence.calls import (
    ANSWER_BYTES,
    BEAT,
    HEARTBEAT,
    KNOWN_LIMIT,
    NOTHING_TO_SAY,
    PAGE,
    SHORT,
    Answer,
    Beat,
    Page,
    Request,
    tag_of,
)
from peers.presence.copies import Copies
from peers.presence.heartbeat import DEFAULT_LIFETIME, Heartbeat, PeerState
from peers.presence.heartbeat_store import NEVER, HeartbeatStore, Kept, is_from_the_future
from peers.values.wire import pack, unpack_from

REFRESH_SHARE = 0.4
"""Fraction of a heartbeat's lifetime between two signed heartbeats: short, so that a copied key is noticed in time."""
STALE_SHARE = 0.8  # fraction of a signed heartbeat's lifetime after which its peer is asked for a new one
AUDIENCE_LIMIT = 128  # maximum number of peers to which this peer sends beats
NEW_AT_ONCE = 64  # maximum number of calls at once to peers that may not exist, as they confirmed no heartbeat of ours
PAUSE_FIRST, PAUSE_LAST = 1.0, 30.0  # seconds without calls to a silent peer: after its first failure, and the maximum
# Limits on heartbeats handed out to one peer: bytes at once, and bytes a second. The limits for all peers together are
# TOGETHER times as high.
WHO_BURST, WHO_RATE, TOGETHER = 1 << 19, 1 << 16, 4
# Limits on heartbeats from all unknown peers together, since each must be verified: bytes at once, and bytes a second.
STRANGERS_BURST, STRANGERS_RATE = 1 << 18, 1 << 16
ON_THE_WAY = frozenset({"sequence", "state", "view", "inner_step", "speed", "leads", "tokens_per_second", "loss"})
"""Fields of a heartbeat whose change needs no new signed heartbeat; beats carry most of them."""


class Audience:
    """The peers to send beats to, the heartbeat of ours that each has confirmed, and pauses for silent peers."""

    def __init__(self) -> None:
        self.peers: frozenset[str] = frozenset()
        self._in_turn: tuple[str, ...] = ()
        self._confirmed: dict[str, int] = {}  # by peer: sequence of the heartbeat of ours that it confirmed
        self._under_way: set[str] = set()
        # by peer: the time on our clock until which the peer is not called, and the length of this pause in seconds
        self._call_pauses: dict[str, tuple[float, float]] = {}

    def choose(self, others: Sequence[str], voters: Collection[str]) -> None:
        """Choose the peers to send beats to: voters first, then peers that answer, each group in the order of `others`
        (longest known first). Made-up peers are newer or do not answer, so a flood of them displaces no real peer."""
        chosen = sorted(others, key=lambda peer: (peer not in voters, peer in self._call_pauses))[:AUDIENCE_LIMIT]
        self._in_turn, self.peers = tuple(chosen), frozenset(chosen)
        present = frozenset(others)
        self._call_pauses = {peer: pause for peer, pause in self._call_pauses.items() if peer in present}
        self._confirmed = {peer: sequence for peer, sequence in self._confirmed.items() if peer in self.peers}

    def due(self, now: float) -> list[str]:
        """Return the peers to call now: those to which no call is under way and calls are not paused."""
        idle = [peer for peer in self._in_turn if peer not in self._under_way]
        due = [peer for peer in idle if now >= self._call_pauses.get(peer, (now, 0.0))[0]]
        room = NEW_AT_ONCE - sum(peer not in self._confirmed for peer in self._under_way)
        new = [peer for peer in due if peer not in self._confirmed][: max(0, room)]
        return [peer for peer in due if peer in self._confirmed] + new

    def has(self, peer: str, sequence: int) -> bool:
        """Return True if the peer has confirmed the signed heartbeat of ours with this sequence."""
        return self._confirmed.get(peer) == sequence

    def begins(self, peer: str) -> None:
        """Record that a call to a peer is under way."""
        self._under_way.add(peer)

    def answered(self, peer: str, sequence: int | None, wants: bool) -> None:
        """Record that a peer has answered a call. The call carried our signed heartbeat with this `sequence`, or a beat
        if `sequence` is None. `wants` is True if the peer must still get our signed heartbeat.
        """
        self._under_way.discard(peer)
        self._call_pauses.pop(peer, None)
        if wants:
            self._confirmed.pop(peer, None)
        elif sequence is not None and peer in self.peers:
            self._confirmed[peer] = sequence

    def failed(self, peer: str, now: float) -> None:
        """Pause calls to a peer, longer after each failure. The next call sends it our signed heartbeat again, because
        it may have restarted."""
        self._under_way.discard(peer)
        self._confirmed.pop(peer, None)
        length = min(PAUSE_LAST, 2 * self._call_pauses.get(peer, (0.0, PAUSE_FIRST / 2))[1])
        if peer in self.peers:
            self._call_pauses[peer] = now + length, length

    def end_pause(self, peer: str) -> None:
        """End the pause in calls to a peer, because it has sent us a message."""
        self._call_pauses.pop(peer, None)


class Call(NamedTuple):
    """A call to a peer: its name and payload, and the sequence of our signed heartbeat in it; None for a beat."""

    name: str
    payload: bytes
    sequence: int | None


class Beats:
    """One peer's beats in one run, sent and received. `now` is on its own clock, `wall` on the wall clock (seconds)."""

    def __init__(self, me: str, run: str) -> None:
        self.me = me
        self.run = run
        self.lifetime = DEFAULT_LIFETIME
        """Seconds for which our heartbeats are valid."""
        self.store = HeartbeatStore()
        self.audience = Audience()
        self.copies = Copies()
        self.admission: RunAdmission | None = None
        """Admission to the run; None if the run is open."""
        self.linked_at = NEVER
        """The last time at which another peer was heard over its link."""
        self.own: Kept | None = None
        """Our own heartbeat; None for a visitor that is not in the run."""
        self._beat: Beat | None = None
        self._who = Allowances(WHO_BURST, WHO_RATE, TOGETHER)
        self._strangers = Allowance(STRANGERS_BURST, STRANGERS_RATE)

    # Our own messages -----------------------------------------------------------------------------------------
    def is_news(self, heartbeat: Heartbeat, now: float) -> bool:
        """Return True if our new heartbeat must be signed and sent, because a beat cannot carry its changes."""
        own = self.own
        is_leaving = heartbeat.state is PeerState.LEAVING
        if own is None or is_leaving or now - own.taken_at >= REFRESH_SHARE * self.lifetime:
            return True
        before = own.heartbeat.__dict__
        return any(value != before[name] for name, value in heartbeat.__dict__.items() if name not in ON_THE_WAY)

    def say(self, signed: bytes, now: float) -> None:
        """Store our new signed heartbeat, to be sent from now on. Raises: RemoteProtocolError if it is invalid."""
        heartbeat = Heartbeat.verify(signed, self.run)
        first_at = self.own.first_at if self.own else now
        self.own = Kept(heartbeat, signed, heartbeat, taken_at=now, first_at=first_at, heard_at=now)
        self.lifetime, self.copies.ours = heartbeat.lifetime, heartbeat.life
        self._beat = Beat.of(heartbeat)

    def go_on(self, heartbeat: Heartbeat, now: float) -> None:
        """Keep our last signed heartbeat. From now on beats carry the changes in the new `heartbeat`."""
        if self.own is not None:
            self.own.newest, self.own.heard_at = heartbeat, now
            self._beat = Beat.of(heartbeat)

    def choose(self, voters: Collection[str], now: float) -> None:
        """Choose at most AUDIENCE_LIMIT other peers to send beats to: voters first, then peers that answer."""
        self.audience.choose(self.others(now), voters)

    def call_for(self, peer: str) -> Call | None:
        """Return the call to make to a peer now: our signed heartbeat until the peer confirms it, then beats; None if
        we are not in the run. The caller must report the call's end by `answered` or `failed`."""
        own = self.own
        if own is None or self._beat is None:
            return None
        self.audience.begins(peer)
        sequence = own.heartbeat.sequence
        if not self.audience.has(peer, sequence):
            return Call(HEARTBEAT, tag_of(self.run) + own.signed, sequence)
        return Call(BEAT, pack(self._beat), None)

    def answered(self, peer: str, call: Call, packed: bytes, now: float, wall: float) -> bool:
        """Process a peer's answer to a call. Return True if the peer must be called again with our signed heartbeat.

        Raises: RemoteProtocolError; the call then counts as failed.
        """
        try:
            answer = unpack_from(peer, Answer, packed, ANSWER_BYTES) if packed else Answer(wants=False)
            for signed in answer.heartbeats:
                self._take_from_answer(peer, signed, now, wall)
        except RemoteProtocolError:
            self.audience.failed(peer, now)
            raise
        self._heard(peer, now)
        is_missing = answer.beat is not None and not self._take_beat(peer, answer.beat, now, wall)
        # The answer to our signed heartbeat carries the peer's, so we ask for a missing one by sending ours again.
        self.audience.answered(peer, call.sequence, answer.wants or (is_missing and call.sequence is None))
        return answer.wants and call.sequence is None

    def failed(self, peer: str, now: float) -> None:
        """Record that a peer did not answer a call."""
        self.audience.failed(peer, now)

    # Messages from other peers --------------------------------------------------------------------------------
    def hear_beat(self, sender: str, beat: Beat, now: float, wall: float) -> bytes:
        """Process another peer's beat, and return the packed answer. The beat of an unknown peer is not stored."""
        if self.store.get(sender) is None:
            return pack(Answer(wants=True))
        self._heard(sender, now)
        wants = not self._take_beat(sender, beat, now, wall)
        own = self._beat if sender not in self.audience.peers else None
        return pack(Answer(wants=wants, beat=own)) if wants or own is not None else NOTHING_TO_SAY

    def hear_heartbeat(self, sender: str, signed: bytes, now: float, wall: float) -> bytes:
        """Store the sender's own signed heartbeat, and return the packed answer to it.

        Raises: RemoteProtocolError; AdmissionError when the sender needs a ticket and has none.
        """
        before = self.store.get(sender)
        if not self._may_send(sender, before, len(signed), now):
            return pack(Answer(wants=True))
        double = (before.heartbeat.life, before.signed) if before and before.is_fresh(now) else None
        heartbeat = Heartbeat.verify(signed, self.run)
        if heartbeat.peer != sender:
            raise RemoteProtocolError(sender, f"it sent the heartbeat of {heartbeat.peer}")
        if reason := self._refusal(heartbeat, wall):
            raise refused(sender, self.run, reason)
        self._keep(heartbeat, signed, now, wall)
        self._heard(sender, now)
        own = self.own
        heartbeats = [own.signed] if own is not None and not self.audience.has(sender, own.heartbeat.sequence) else []
        heartbeats += [double[1]] if double and double[0] != heartbeat.life else []
        return pack(Answer(wants=False, heartbeats=tuple(heartbeats))) if heartbeats else NOTHING_TO_SAY

    def _may_send(self, sender: str, kept: Kept | None, size: int, now: float) -> bool:
        """Return True if the sender may send `size` bytes of heartbeat, and count them. Unknown peers share a limit."""
        if kept is not None:
            self._heard(sender, now)
            if kept.may_send(now):
                kept.spend(size, now)
                return True
        elif self._strangers.has_some(now):
            self._strangers.spend(size)
            return True
        return False

    def found(self, signed: bytes, now: float, wall: float) -> bool:
        """Store a peer's signed heartbeat from the DHT. Return True if it is new; it is then a sign of life.

        Raises: RemoteProtocolError.
        """
        heartbeat = Heartbeat.verify(signed, self.run)
        is_new = self._keep(heartbeat, signed, now, wall)
        if is_new:
            self.store.heard(heartbeat.peer, now)
        return is_new

    def _take_from_answer(self, peer: str, signed: bytes, now: float, wall: float) -> None:
        """Store a heartbeat from a peer's answer if it is the peer's. If it is signed with our key instead, note that
        another machine may use our key.

        Raises: RemoteProtocolError.
        """
        heartbeat = Heartbeat.verify(signed, self.run)
        if heartbeat.peer not in (peer, self.me):
            raise RemoteProtocolError(peer, f"it sent the heartbeat of {heartbeat.peer}")
        self._keep(heartbeat, signed, now, wall)

    def _keep(self, heartbeat: Heartbeat, signed: bytes, now: float, wall: float) -> bool:
        """Store a heartbeat if it is new. Return True if it was stored. A heartbeat with our own key is not stored, but
        may show that another machine uses our key."""
        if heartbeat.peer == self.me:
            self.copies.hear(heartbeat, now)
            return False
        return not self._refusal(heartbeat, wall) and self.store.take(heartbeat, signed, now, wall)

    def _take_beat(self, peer: str, beat: Beat, now: float, wall: float) -> bool:
        """Store a peer's beat if it fits the peer's signed heartbeat. Return False if we need a newer signed one."""
        kept = self.store.get(peer)
        if kept is None or beat.incarnation != kept.heartbeat.incarnation or is_from_the_future(beat.sequence, wall):
            return False
        if beat.sequence > kept.newest.sequence:
            kept.newest = beat.added_to(kept.newest)
        is_old = now - kept.taken_at > STALE_SHARE * kept.heartbeat.lifetime
        return beat.goes_on(kept.heartbeat) and not is_old

    def _heard(self, peer: str, now: float) -> None:
        self.store.heard(peer, now)
        self.audience.end_pause(peer)
        self.linked_at = now

    def _refusal(self, heartbeat: Heartbeat, wall: float) -> str:
        """Return the reason why the heartbeat's peer may not take part in the run; empty if it may."""
        return self.admission.admit(heartbeat.peer, heartbeat.ticket, wall) if self.admission else ""

    def see_out(self, wall: float) -> None:
        """Drop the peers that may not take part any more, because their tickets were revoked or have expired."""
        for kept in self.store.all():
            if self._refusal(kept.heartbeat, wall):
                self.store.drop(kept.heartbeat.peer)

    # Known peers ----------------------------------------------------------------------------------------------
    def others(self, now: float) -> list[str]:
        """Return the ids of the other peers that are not leaving, and from which a heartbeat or message came within the
        lifetime of their heartbeats. The peer known for longest is first."""
        return [kept.heartbeat.peer for kept in self.store.fresh(now) if kept.is_present(now)]

    def heartbeats(self, now: float) -> list[Heartbeat]:
        """Return the newest heartbeat of each peer, ours included, if it has not expired, sorted by peer id."""
        known = (*filter(None, [self.own]), *self.store.fresh(now))
        return sorted((kept.newest for kept in known), key=lambda heartbeat: heartbeat.peer)

    def silences(self, now: float) -> dict[str, float]:
        """Return the seconds since each other peer was last heard, by peer, for peers that were heard lately."""
        return {kept.heartbeat.peer: now - kept.heard_at for kept in self.store.fresh(now) if kept.heard_at > NEVER}

    def known_since(self, peer: str) -> float:
        """Return the time, on our clock, at which a peer first became known; 0 for an unknown peer."""
        return kept.first_at if (kept := self.store.get(peer)) else 0.0

    # Requests for heartbeats ----------------------------------------------------------------------------------
    def hand_out(self, sender: str, request: Request, now: float, wall: float) -> bytes:
        """Return a packed page with the heartbeats of this peer and of the peers that it hears, except those that the
        request names. A heartbeat with the sender's own key is included, by which the sender notices another machine
        that uses its key.

        Raises: RemoteProtocolError; AdmissionError when the sender needs a ticket and has shown none.
        """
        if request.run != self.run:
            raise RemoteProtocolError(sender, f"it asks about run {request.run}, not {self.run}")
        is_known = self.store.get(sender) is not None
        if self.admission is not None and not is_known and (reason := self.admission.admit(sender, b"", wall)):
            raise refused(sender, self.run, reason)
        account = sender if is_known else STRANGER
        if not self._who.has_some(account, now):
            return NOTHING_TO_SAY
        tags = {request.known[at : at + SHORT] for at in range(0, len(request.known), SHORT)}
        heard = (kept for kept in (*filter(None, [self.own]), *self.store.fresh(now)) if kept.is_heard(now))
        missing = (kept.signed for kept in heard if tag_of(kept.heartbeat.peer) not in tags)
        page = Page(heartbeats=tuple(islice(missing, PAGE))).packed()
        self._who.spend(account, len(page) + len(request.known))
        return page

    def request(self, known: Collection[str]) -> Request:
        """Return a request for the heartbeats of all peers that are not in `known`."""
        tags = [tag_of(peer) for peer in known if peer != self.me]
        return Request(run=self.run, known=b"".join(tags[:KNOWN_LIMIT]))

    def take_page(self, sender: str, packed: bytes, now: float, wall: float) -> set[str]:
        """Store the heartbeats on a packed page, and return the ids of their peers. A page is no sign of life of them.

        Raises: RemoteProtocolError.
        """
        found = set[str]()
        for signed in Page.unpack(sender, packed).heartbeats:
            heartbeat = Heartbeat.verify(signed, self.run)
            self._keep(heartbeat, signed, now, wall)
            found.add(heartbeat.peer)
        return found
