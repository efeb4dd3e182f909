"""Beats: how the peers of a run tell each other that they are there, without input or output (R20).

Every two seconds a peer sends each other one a *beat* (calls.py), in some 60 bytes without a signature, since the link
vouches for its sender. Its signed heartbeat, which says all the rest, goes the same way when it has changed, and now
and then. The answer says whether the other one lacks it. So a stranger's beat costs nothing: it is asked who it is.

Each peer believes what it hears itself. Signed heartbeats of others are handed out to newcomers and to visitors who
only look, so that they know whom to ask; they are no signs of life.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from peers.errors import RemoteProtocolError
from peers.presence.admission import RunAdmission, refused
from peers.presence.allowances import Allowance, Allowances
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
"""Of a heartbeat's lifetime, from one signed heartbeat to the next: so often that a copied key is noticed in time."""
STALE_SHARE = 0.8  # of a heartbeat's lifetime, after which a signed one is asked for again
AUDIENCE_LIMIT = 128  # peers
NEW_AT_ONCE = 64  # of them that are told something first: made-up peers cost a call each
PAUSE_FIRST, PAUSE_LAST = 1.0, 30.0  # seconds for which a peer that did not answer is left alone
STRANGER = "stranger"  # all peers that are not in the run share what one peer may have
WHO_BURST, WHO_RATE, TOGETHER = 1 << 19, 1 << 16, 4  # bytes, and bytes a second, of pages; times that for all together
STRANGERS_BURST, STRANGERS_RATE = 1 << 18, 1 << 16  # the same, of first heartbeats that are checked
ON_THE_WAY = frozenset({"sequence", "state", "view", "inner_step", "speed", "leads", "tokens_per_second", "loss"})
"""Fields of a heartbeat that beats tell, or that are worth no heartbeat of their own."""


class Audience:
    """The peers to beat to, what each of them has of us, and which of them do not answer."""

    def __init__(self) -> None:
        self.peers: frozenset[str] = frozenset()
        self._in_turn: tuple[str, ...] = ()
        self._told: dict[str, int] = {}  # the sequence of our signed heartbeat that each has confirmed
        self._under_way: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and for how long

    def choose(self, others: Sequence[str], voters: Collection[str]) -> None:
        """Choose from the others that seem to be there: voters, then those that answer, the one known for longest
        first. A flood of made-up peers comes later or does not answer, so it displaces nobody."""
        chosen = sorted(others, key=lambda peer: (peer not in voters, peer in self._pauses))[:AUDIENCE_LIMIT]
        self._in_turn, self.peers = tuple(chosen), frozenset(chosen)
        present = frozenset(others)
        self._pauses = {peer: pause for peer, pause in self._pauses.items() if peer in present}
        self._told = {peer: sequence for peer, sequence in self._told.items() if peer in self.peers}

    def due(self, now: float) -> list[str]:
        """Return the peers to tell something now: those that are not being told, and not left alone."""
        idle = [peer for peer in self._in_turn if peer not in self._under_way]
        due = [peer for peer in idle if now >= self._pauses.get(peer, (now, 0.0))[0]]
        room = NEW_AT_ONCE - sum(peer not in self._told for peer in self._under_way)
        new = [peer for peer in due if peer not in self._told][: max(0, room)]
        return [peer for peer in due if peer in self._told] + new

    def has(self, peer: str, sequence: int) -> bool:
        """Return whether a peer has confirmed our signed heartbeat of this sequence."""
        return self._told.get(peer) == sequence

    def begins(self, peer: str) -> None:
        """Note that a peer is being told something."""
        self._under_way.add(peer)

    def answered(self, peer: str, sequence: int | None, wants: bool) -> None:
        """Note that a peer has answered to our signed heartbeat of this sequence, or to a beat (None)."""
        self._under_way.discard(peer)
        self._pauses.pop(peer, None)
        if wants:
            self._told.pop(peer, None)
        elif sequence is not None and peer in self.peers:
            self._told[peer] = sequence

    def failed(self, peer: str, now: float) -> None:
        """Leave a peer alone for a while, longer each time it does not answer. It may have started anew meanwhile."""
        self._under_way.discard(peer)
        self._told.pop(peer, None)
        length = min(PAUSE_LAST, 2 * self._pauses.get(peer, (0.0, PAUSE_FIRST / 2))[1])
        if peer in self.peers:
            self._pauses[peer] = now + length, length

    def end_pause(self, peer: str) -> None:
        """Note that a peer has spoken to us."""
        self._pauses.pop(peer, None)


class Word(NamedTuple):
    """One thing to tell a peer: the call's name, and its payload. `sequence` is that of a signed heartbeat."""

    call: str
    payload: bytes
    sequence: int | None


class Beats:
    """One peer's part in the beats of one run. `now` is our clock, `wall` everybody's."""

    def __init__(self, me: str, run: str) -> None:
        self.me = me
        self.run = run
        self.lifetime = DEFAULT_LIFETIME
        """Seconds, of our heartbeats."""
        self.store = HeartbeatStore()
        self.audience = Audience()
        self.copies = Copies()
        self.admission: RunAdmission | None = None
        """Admission to the run; None: it is open."""
        self.linked_at = NEVER
        """When another peer was last heard over its link."""
        self.own: Kept | None = None
        """Our own heartbeat; None: we are not in the run, and only look."""
        self._beat: Beat | None = None
        self._who = Allowances(WHO_BURST, WHO_RATE, TOGETHER)
        self._strangers = Allowance(STRANGERS_BURST, STRANGERS_RATE)

    # What we say ----------------------------------------------------------------------------------------------
    def is_news(self, heartbeat: Heartbeat, now: float) -> bool:
        """Return whether a heartbeat of ours is to be signed, and a beat not enough."""
        own = self.own
        is_leaving = heartbeat.state is PeerState.LEAVING
        if own is None or is_leaving or now - own.taken_at >= REFRESH_SHARE * self.lifetime:
            return True
        before = own.heartbeat.__dict__
        return any(said != before[name] for name, said in heartbeat.__dict__.items() if name not in ON_THE_WAY)

    def say(self, signed: bytes, now: float) -> None:
        """Say a signed heartbeat of our own from now on. Raises: RemoteProtocolError."""
        heartbeat = Heartbeat.verify(signed, self.run)
        first_at = self.own.first_at if self.own else now
        self.own = Kept(heartbeat, signed, heartbeat, taken_at=now, first_at=first_at, heard_at=now)
        self.lifetime, self.copies.ours = heartbeat.lifetime, heartbeat.life
        self._beat = Beat.of(heartbeat)

    def go_on(self, heartbeat: Heartbeat, now: float) -> None:
        """Say the same from now on but for what beats tell."""
        if self.own is not None:
            self.own.newest, self.own.heard_at = heartbeat, now
            self._beat = Beat.of(heartbeat)

    def choose(self, voters: Collection[str], now: float) -> None:
        """Choose whom to tell."""
        self.audience.choose(self.others(now), voters)

    def word_for(self, peer: str) -> Word | None:
        """Return what to tell a peer now: the signed heartbeat until the peer confirms it, else a beat. None: we are
        not in the run. `answered` or `failed` is to follow."""
        own = self.own
        if own is None or self._beat is None:
            return None
        self.audience.begins(peer)
        sequence = own.heartbeat.sequence
        if not self.audience.has(peer, sequence):
            return Word(HEARTBEAT, tag_of(self.run) + own.signed, sequence)
        return Word(BEAT, pack(self._beat), None)

    def answered(self, peer: str, word: Word, packed: bytes, now: float, wall: float) -> bool:
        """Take in the answer to a word. Returns whether the peer wants another word at once.

        Raises: RemoteProtocolError, after which it has failed.
        """
        try:
            answer = unpack_from(peer, Answer, packed, ANSWER_BYTES) if packed else Answer(wants=False)
            for signed in answer.heartbeats:
                self._hear_word(peer, signed, now, wall)
        except RemoteProtocolError:
            self.audience.failed(peer, now)
            raise
        self._heard(peer, now)
        lacks = answer.beat is not None and not self._take_beat(peer, answer.beat, now, wall)
        # The answer to a signed heartbeat brings the other one's, if that is lacking.
        self.audience.answered(peer, word.sequence, answer.wants or (lacks and word.sequence is None))
        return answer.wants and word.sequence is None

    def failed(self, peer: str, now: float) -> None:
        """Note that a peer did not answer."""
        self.audience.failed(peer, now)

    # What others say ------------------------------------------------------------------------------------------
    def hear_beat(self, sender: str, beat: Beat, now: float, wall: float) -> bytes:
        """Take in another peer's beat, and return the answer. Nothing is remembered of a stranger."""
        if self.store.get(sender) is None:
            return pack(Answer(wants=True))
        self._heard(sender, now)
        wants = not self._take_beat(sender, beat, now, wall)
        own = self._beat if sender not in self.audience.peers else None
        return pack(Answer(wants=wants, beat=own)) if wants or own is not None else NOTHING_TO_SAY

    def hear_heartbeat(self, sender: str, signed: bytes, now: float, wall: float) -> bytes:
        """Take in another peer's own signed heartbeat, and return the answer.

        Raises: RemoteProtocolError; AdmissionError, when the sender has no ticket and needs one.
        """
        before = self.store.get(sender)
        if not self._may_send(sender, before, len(signed), now):
            return pack(Answer(wants=True))
        double = (before.heartbeat.life, before.signed) if before and before.is_fresh(now) else None
        heartbeat = Heartbeat.verify(signed, self.run)
        if heartbeat.peer != sender:
            raise RemoteProtocolError(sender, f"it speaks for {heartbeat.peer}")
        if reason := self._refusal(heartbeat, wall):
            raise refused(sender, self.run, reason)
        self._keep(heartbeat, signed, now, wall)
        self._heard(sender, now)
        own = self.own
        said = [own.signed] if own is not None and not self.audience.has(sender, own.heartbeat.sequence) else []
        said += [double[1]] if double and double[0] != heartbeat.life else []
        return pack(Answer(wants=False, heartbeats=tuple(said))) if said else NOTHING_TO_SAY

    def _may_send(self, sender: str, kept: Kept | None, size: int, now: float) -> bool:
        """Return whether to check a signed heartbeat of this size, and count it. All strangers share an allowance."""
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
        """Take in a heartbeat that its peer has left in the DHT. Returns whether it is new, and so a sign of life.

        Raises: RemoteProtocolError.
        """
        heartbeat = Heartbeat.verify(signed, self.run)
        is_new = self._keep(heartbeat, signed, now, wall)
        if is_new:
            self.store.heard(heartbeat.peer, now)
        return is_new

    def _hear_word(self, peer: str, signed: bytes, now: float, wall: float) -> None:
        """Take in a heartbeat with an answer: the peer's own, or one of our key. Raises: RemoteProtocolError."""
        heartbeat = Heartbeat.verify(signed, self.run)
        if heartbeat.peer not in (peer, self.me):
            raise RemoteProtocolError(peer, f"it speaks for {heartbeat.peer}")
        self._keep(heartbeat, signed, now, wall)

    def _keep(self, heartbeat: Heartbeat, signed: bytes, now: float, wall: float) -> bool:
        """Keep a heartbeat, if it is news. Of ourselves we know better, but for what another machine says with our
        key."""
        if heartbeat.peer == self.me:
            self.copies.hear(heartbeat, now)
            return False
        return not self._refusal(heartbeat, wall) and self.store.take(heartbeat, signed, now, wall)

    def _take_beat(self, peer: str, beat: Beat, now: float, wall: float) -> bool:
        """Take in a peer's beat. Returns whether its signed heartbeat is here, too."""
        kept = self.store.get(peer)
        if kept is None or beat.incarnation != kept.heartbeat.incarnation or is_from_the_future(beat.sequence, wall):
            return False
        if beat.sequence > kept.newest.sequence:
            kept.newest = beat.added_to(kept.newest)
        is_old = now - kept.taken_at > STALE_SHARE * kept.heartbeat.lifetime
        return beat.goes_on(kept.heartbeat) and not is_old

    def _heard(self, peer: str, now: float) -> None:
        """Note that a peer has spoken to us over its link."""
        self.store.heard(peer, now)
        self.audience.end_pause(peer)
        self.linked_at = now

    def _refusal(self, heartbeat: Heartbeat, wall: float) -> str:
        """Return why a peer may not take part; empty: it may."""
        return self.admission.admit(heartbeat.peer, heartbeat.ticket, wall) if self.admission else ""

    def see_out(self, wall: float) -> None:
        """Forget the peers that may not take part any more: their tickets were revoked, or are expired."""
        for kept in self.store.all():
            if self._refusal(kept.heartbeat, wall):
                self.store.drop(kept.heartbeat.peer)

    # Who is there ---------------------------------------------------------------------------------------------
    def others(self, now: float) -> list[str]:
        """Return the other peers that seem to be there, the one known for longest first."""
        return [kept.heartbeat.peer for kept in self.store.fresh(now) if kept.is_present(now)]

    def heartbeats(self, now: float) -> list[Heartbeat]:
        """Return the newest heartbeat of each peer that is known, ours included, by peer id."""
        known = (*filter(None, [self.own]), *self.store.fresh(now))
        return sorted((kept.newest for kept in known), key=lambda heartbeat: heartbeat.peer)

    def silences(self, now: float) -> dict[str, float]:
        """Return for how many seconds each other peer was silent, of those that were heard lately."""
        return {kept.heartbeat.peer: now - kept.heard_at for kept in self.store.fresh(now) if kept.heard_at > NEVER}

    def known_since(self, peer: str) -> float:
        """Return when anything was first known of a peer."""
        return kept.first_at if (kept := self.store.get(peer)) else 0.0

    # Questions ------------------------------------------------------------------------------------------------
    def hand_out(self, sender: str, request: Request, now: float, wall: float) -> bytes:
        """Return a page of the heartbeats that a peer, or a visitor, lacks of those that we hear. Of the sender's own
        key we tell what we have: it may be another machine's.

        Raises: RemoteProtocolError; AdmissionError, when the sender has shown no ticket and needs one.
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
        lacking = (kept.signed for kept in heard if tag_of(kept.heartbeat.peer) not in tags)
        page = Page(heartbeats=tuple(islice(lacking, PAGE))).packed()
        self._who.spend(account, len(page) + len(request.known))
        return page

    def request(self, known: Collection[str]) -> Request:
        """Return the question for peers besides these."""
        tags = [tag_of(peer) for peer in known if peer != self.me]
        return Request(run=self.run, known=b"".join(tags[:KNOWN_LIMIT]))

    def take_page(self, sender: str, packed: bytes, now: float, wall: float) -> set[str]:
        """Take in a page, and return the peers that are on it. None of them counts as heard.

        Raises: RemoteProtocolError.
        """
        found = set[str]()
        for signed in Page.unpack(sender, packed).heartbeats:
            heartbeat = Heartbeat.verify(signed, self.run)
            self._keep(heartbeat, signed, now, wall)
            found.add(heartbeat.peer)
        return found
