"""The leader's side of one position: gather who is ready, run attempts until one is complete, commit.

Safety does not depend on there being one leader. An attempt commits only when every member of its roster says
Complete, the roster holds more than half of the last one, and a member completes attempts of only the leader it is
pledged to. So whoever leads next meets a member that knows of the attempt, and hands the same entry on (`adopted`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from peers.election import ATTEMPT_LEAP, culprits, quorum, take_order
from peers.events import Dropped, Effect, Note, Send
from peers.heartbeat import Heartbeat
from peers.leases import Lease
from peers.log import MEMBER_LIMIT, Header, LogError, LogState, Member
from peers.membership import PARTICIPATING
from peers.messages import (
    Abort,
    Accuse,
    Attempt,
    Begin,
    Commit,
    Complete,
    Held,
    LeaseGrant,
    LeaseRequest,
    Ready,
    Refuse,
    Waiting,
)
from peers.settings import RunSettings
from peers.wire import printable

OVERTAKING_LIMIT = 8
"""How often one peer may make the others at a position say Ready again."""


class Leader:
    """What one peer knows as leader of one position. Dropped when the position is passed or the lead is lost."""

    def __init__(self, me: str, log: LogState, state_digest: bytes, settings: RunSettings) -> None:
        self._me = me
        self._log = log
        self._state_digest = state_digest
        self._settings = settings
        self._granted: dict[str, Lease] = {}
        self._ready: dict[str, Ready] = {}
        self._barred_until: dict[str, float] = {}
        self._strikes: Counter[str] = Counter()
        self._overtaken: Counter[str] = Counter()
        self._first_ready_at: float | None = None
        self._last_number = 0
        self._running: Begin | None = None
        self._began_at = 0.0
        self._complete: dict[str, bytes] = {}
        self._waiting: dict[str, tuple[str, ...]] = {}

    @property
    def running(self) -> bool:
        return self._running is not None

    # Leases for joiners ---------------------------------------------------------------------------------------
    def on_lease_request(self, sender: str, request: LeaseRequest, inner_step: int) -> list[Effect]:
        """Grant samples; fewer inner steps the further we are ourselves, so that the joiner finishes with us."""
        if request.state_digest != self._state_digest:
            return [self._refuse(sender, "its state at this position is not ours")]
        lease = self._log.leases.get(sender) or self._granted.get(sender)
        if lease is None:
            given = set(self._granted.values())
            lease = next((grant for grant in self._log.grants if grant not in given), None)
            if lease is None:
                return []  # as many joiners as one entry can take
        self._granted[sender] = lease
        steps = max(1, self._settings.inner_steps - inner_step)
        return [Send(sender, LeaseGrant(position=self._log.position, samples=lease, steps=steps))]

    # Gathering ------------------------------------------------------------------------------------------------
    def on_ready(self, sender: str, ready: Ready, now: float) -> list[Effect]:
        if self._running and sender in self._members():
            if ready.last_attempt < self._running.attempt.number:
                return [Send(sender, self._running)]  # it has not heard of the attempt yet
            return self._abort(f"{sender} has left the attempt") + self.on_ready(sender, ready, now)
        if now < self._barred_until.get(sender, now):
            return []  # it held an attempt up; the others may go on without it meanwhile
        if len(self._ready) >= MEMBER_LIMIT and sender not in self._ready:
            return []  # as many as one entry can take
        if ready.state_digest != self._state_digest:
            return [self._refuse(sender, "its state at this position is not ours")]
        if ready.last_attempt < self._last_number:
            return [self._ask_again(sender)]
        try:
            self._admit(sender, ready)
        except LogError as error:
            return [Dropped(sender, "ready", str(error)), self._refuse(sender, str(error))]
        overtaken = [peer for peer in self._ready if peer != sender] if ready.last_attempt > self._last_number else []
        if overtaken and not self._may_overtake(sender, now):
            return [Dropped(sender, "ready", "it names a higher attempt again and again")]
        self._last_number = ready.last_attempt
        for peer in overtaken:
            del self._ready[peer]
        self._ready[sender] = ready
        if self._first_ready_at is None:
            self._first_ready_at = now
        return [self._ask_again(peer) for peer in overtaken]

    def _admit(self, sender: str, ready: Ready) -> None:
        """Raises: LogError unless this Ready and the others can be in one entry.

        What a leader before us granted is good, too, unless we have granted it to somebody else.
        """
        if ready.last_attempt - self._last_number > ATTEMPT_LEAP:
            raise LogError("its attempt number is out of reach")
        lease = self._log.lease_of(sender, ready.samples)
        if any(grant == lease for peer, grant in self._granted.items() if peer != sender):
            raise LogError("its samples were given to another joiner")
        others = [member for peer, member in self._offers().items() if peer != sender]
        self._log.check([*others, Member(peer=sender, tokens=ready.tokens, samples=ready.samples)])
        if lease and sender not in self._log.leases:
            self._granted[sender] = lease

    def _may_overtake(self, sender: str, now: float) -> bool:
        """Whether the others must say Ready again for this peer's higher number; each peer may ask that a few times."""
        self._overtaken[sender] += 1
        if self._overtaken[sender] > OVERTAKING_LIMIT:
            self._bar(sender, now)
        return self._overtaken[sender] <= OVERTAKING_LIMIT

    def _ask_again(self, peer: str) -> Effect:
        """Every Ready of an attempt must name the number before it: then nobody in it can meanwhile complete an earlier
        attempt of somebody else's, and what they hold is all that may have been committed."""
        attempt = Attempt(position=self._log.position, number=self._last_number, leader=self._me)
        return Send(peer, Abort(attempt=attempt, reason="say Ready for a later attempt"))

    def gone(self, peer: str) -> list[Effect]:
        """The peer left or can't be reached."""
        self._ready.pop(peer, None)
        if self._running and peer in self._members():
            return self._abort(f"{peer} is gone")
        return []

    def tick(self, now: float, live: Mapping[str, Heartbeat], left: Collection[str]) -> list[Effect]:
        """Close the roster, or give up on an attempt, when it is time. `live` are the other peers' heartbeats."""
        for peer in [peer for peer in self._ready if peer != self._me and peer not in live]:
            effects = self.gone(peer)
            if effects:
                return effects
        if self._running:
            late = now - self._began_at > self._settings.timing.round_timeout
            return self._give_up(now) if late else []
        return self._begin(now) if self._may_begin(now, live, left) else []

    def _may_begin(self, now: float, live: Mapping[str, Heartbeat], left: Collection[str]) -> bool:
        if self._first_ready_at is None or not any(ready.tokens for ready in self._ready.values()):
            return False
        waited = now - self._first_ready_at
        at_work = {peer for peer in self._log.leases if peer in live and live[peer].state in PARTICIPATING}
        expected = at_work | (set(self._granted) & set(live)) | {self._me}
        barred = {peer for peer, until in self._barred_until.items() if now < until}
        everyone = expected - barred <= set(self._ready)
        incumbents = {peer for peer, ready in self._ready.items() if ready.incumbent}
        if self._log.roster:
            enough = quorum(self._log.roster, left, incumbents)
        else:
            enough = len(self._ready) >= self._settings.minimum_peers
        timing = self._settings.timing
        return (everyone or waited >= timing.grace) and (enough or waited >= timing.partition_grace)

    # Attempts -------------------------------------------------------------------------------------------------
    def _begin(self, now: float) -> list[Effect]:
        offers = self._offers()
        roster = tuple(offers[peer] for peer in take_order(self._log.roster, offers))
        held = self._latest_held()
        holders = tuple(member.peer for member in roster if held and self._holds(member.peer, held))
        self._last_number += 1
        attempt = Attempt(position=self._log.position, number=self._last_number, leader=self._me)
        self._running = Begin(attempt=attempt, roster=roster, adopted=held, holders=holders)
        self._began_at = now
        self._complete, self._waiting = {}, {}
        note = Note("info", f"attempt {attempt} begins with {len(roster)} peers" + (", handing on" if held else ""))
        return [note, *(Send(peer, self._running) for peer in self._members())]

    def on_waiting(self, sender: str, waiting: Waiting) -> list[Effect]:
        if not self._is_running(waiting.attempt):
            return [Send(sender, Abort(attempt=waiting.attempt, reason="this attempt is over"))]
        if sender in self._members():
            self._waiting[sender] = waiting.missing
        return []

    def on_accuse(self, sender: str, accuse: Accuse, now: float) -> list[Effect]:
        if not self._is_running(accuse.attempt) or not {sender, accuse.accused} <= set(self._members()):
            return []
        self._bar(accuse.accused, now)
        return self._abort(f"{accuse.accused} sent {sender} bad blocks: {accuse.reason}")

    def on_complete(self, sender: str, complete: Complete, now: float) -> list[Effect]:
        if not self._is_running(complete.attempt) or sender not in self._members():
            return [Send(sender, Abort(attempt=complete.attempt, reason="this attempt is over"))]
        assert self._running is not None
        self._complete[sender] = complete.payload
        if set(self._complete) != set(self._members()):
            return []
        adopted = self._running.adopted
        wanted = adopted.header.payload if adopted else Counter(self._complete.values()).most_common(1)[0][0]
        wrong = [peer for peer, payload in self._complete.items() if payload != wanted]
        if wrong:
            for peer in self._running.holders[:1] or wrong:
                self._bar(peer, now)
            return self._abort(f"{', '.join(wrong)} hold another payload")
        header = adopted.header if adopted else self._log.next_header(self._running.roster, wanted)
        return [Send(peer, Commit(header=header)) for peer in self._members()]

    def _give_up(self, now: float) -> list[Effect]:
        slow = culprits(self._members(), self._complete, self._waiting)
        for peer in slow:
            self._bar(peer, now)
        return self._abort(f"time is up; held up by {', '.join(slow) or 'nobody in particular'}")

    def _abort(self, reason: str) -> list[Effect]:
        assert self._running is not None
        abort = Abort(attempt=self._running.attempt, reason=printable(reason))
        members = self._members()
        self._running = None
        self._ready.clear()  # everyone says Ready again, with what it holds by then
        return [Note("warning", f"attempt {abort.attempt} failed: {reason}"), *(Send(peer, abort) for peer in members)]

    def _bar(self, peer: str, now: float) -> None:
        """Leave a peer out for a while, longer each time; never ourselves."""
        if peer != self._me:
            self._strikes[peer] += 1
            self._ready.pop(peer, None)
            self._barred_until[peer] = now + self._strikes[peer] * self._settings.timing.round_timeout

    def _is_running(self, attempt: Attempt) -> bool:
        return self._running is not None and self._running.attempt == attempt

    def _members(self) -> tuple[str, ...]:
        return tuple(member.peer for member in self._running.roster) if self._running else ()

    def _offers(self) -> dict[str, Member]:
        return {
            peer: Member(peer=peer, tokens=ready.tokens, samples=ready.samples) for peer, ready in self._ready.items()
        }

    def _latest_held(self) -> Held | None:
        held = [ready.held for ready in self._ready.values() if ready.held and self._follows(ready.held.header)]
        return max(held, key=lambda item: item.attempt.order, default=None)

    def _follows(self, header: Header) -> bool:
        try:
            self._log.append(header)
        except LogError:
            return False
        return True

    def _holds(self, peer: str, held: Held) -> bool:
        theirs = self._ready[peer].held
        return theirs is not None and theirs.header == held.header

    def _refuse(self, peer: str, reason: str) -> Effect:
        return Send(peer, Refuse(position=self._log.position, reason=printable(reason)))
