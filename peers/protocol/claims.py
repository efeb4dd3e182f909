"""What may have been committed at one position, by what peers have signed that they hold.

All members of an attempt sign before it commits, and they are more than half of the voters. So an entry that was
committed has less than half of the voters against it: of those that are here, remember, and have not signed it since.
Who claims to hold an entry shows its signature, and one peer's signature convinces nobody where all others are here.
Who holds one gives it up when half of the voters show their signatures of not holding it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from peers.log.certificate import ballot, electorate
from peers.log.header import NO_PAYLOAD, Header
from peers.log.state import LogError, LogState
from peers.presence.heartbeat import TAIL
from peers.presence.presence import Presence
from peers.protocol.acceptor import Acceptor
from peers.protocol.certifier import Certifier
from peers.protocol.desk import Desk
from peers.protocol.messages import Adopt, Begin, Ready
from peers.protocol.rounds import Attempt, Disclaimer, Held, Holder, Stance

LEAST_HOLDERS = 16
"""That are named, if there are so many: the others fetch the payload from them."""

AT_ONCE = 16
"""Entries that a leader looks at together; honest peers hold two or three different ones at a place."""


@dataclass(frozen=True)
class Founding:
    """What a run's first entry is measured by: how many make it `least`, of the peers that were `met` here."""

    least: int = 1
    met: Collection[str] | None = None

    def is_by_enough(self, founders: Collection[str]) -> bool:
        """Return whether these are enough, without those whom somebody may have made up."""
        met = founders if self.met is None else [peer for peer in founders if peer in self.met]
        return len(met) >= self.least


ANY = Founding()
"""By whomever."""


@dataclass(frozen=True)
class Claim:
    """An entry, who has signed that it holds it, and the last attempt in which it may have been committed."""

    header: Header
    holders: tuple[Holder, ...]
    since: Attempt


def committed_since(
    log: LogState,
    header: Header,
    holders: Sequence[Holder],
    present: Mapping[str, int],
    departed: Collection[str] = (),
    founding: Founding = ANY,
) -> Attempt | None:
    """Return the last attempt in which an entry may have been committed; None: in none.

    A single signature may name any attempt. So what counts is not the latest one, but that since which too few are
    against it.

    Args:
        present: those who would have signed it, or will say that they have not, and their incarnations.
        departed: members of the last roster that have left, and signed nothing here.
    """
    here = {holder.peer: present.get(holder.peer, 0) for holder in holders} | dict(present)
    voters = _voters(log, header, here, departed, founding)
    against = {peer for peer, start in present.items() if voters.get(peer) == start}
    counted = [holder for holder in holders if holder.peer in voters] or list(holders)
    for holder in sorted(counted, key=lambda holder: holder.attempt.weight, reverse=True):
        against.discard(holder.peer)
        if 2 * len(against) < len(voters) or not voters:
            return holder.attempt
    return None


def _voters(
    log: LogState, header: Header, here: Mapping[str, int], departed: Collection[str], founding: Founding
) -> dict[str, int]:
    """Return who has a say in whether an entry was committed, and their starts: of a founding by too few all who are
    `here`, since whoever founds a run alone is all of its voters."""
    voters = {peer: start for peer, start in electorate(log, header) if peer not in departed}
    return dict(here) if log.last is None and not founding.is_by_enough(voters) else voters


def is_disclaimed(
    certifier: Certifier,
    log: LogState,
    held: Held,
    begin: Begin,
    departed: Collection[str] = (),
    founding: Founding = ANY,
) -> bool:
    """Return whether an entry can't have been committed, since too many members of this attempt have not signed it.

    Only members count, since all of them must sign what the attempt leads to: so none of them turns out to have left,
    in another leader's view, before it could sign anything.
    """
    remaining = set(begin.round.remaining)
    here = {member.peer: member.incarnation for member in begin.round.roster if member.peer in remaining}
    voters = _voters(log, held.header, here, departed, founding)
    members = voters.keys() & remaining
    others = [one for one in begin.disclaimers if one.peer in members and one.held != held.header.digest]
    since = held.attempt.number
    against = {
        one.peer for one in others if one.last_attempt >= since and _is_stance(certifier, log, one, voters[one.peer])
    }
    return 2 * len(against) >= len(voters) > 0


def _is_stance(certifier: Certifier, log: LogState, one: Disclaimer, incarnation: int) -> bool:
    """Return whether this is the peer's own signature."""
    said = Stance(
        position=log.position, peer=one.peer, incarnation=incarnation, last_attempt=one.last_attempt, held=one.held
    )
    return certifier.verify(one.peer, said.text, one.signature)


def disclaimers(ready: Mapping[str, Ready]) -> tuple[Disclaimer, ...]:
    """Return what convinces those who are ready and hold an entry, if there are any."""
    if not any(said.held for said in ready.values()):
        return ()
    return tuple(
        Disclaimer(
            peer=peer,
            last_attempt=said.last_attempt,
            held=said.held.header.digest if said.held else None,
            signature=said.stance,
        )
        for peer, said in sorted(ready.items())
    )


@lru_cache(maxsize=8)
def signers(log: LogState, header: Header) -> Mapping[str, int]:
    """Return who can sign an entry, and as which start: its members, and the voters. Anybody may hold it besides.

    A leader asks of one entry for each of those who hold it."""
    return {member.peer: member.incarnation for member in header.roster} | dict(electorate(log, header))


def is_signed(certifier: Certifier, header: Header, holder: Holder, incarnation: int) -> bool:
    """Return whether a peer has signed, as the start that it is, that it holds an entry."""
    return certifier.verify(holder.peer, ballot(header, holder.attempt.name, incarnation).text, holder.signature)


class Claims:
    """What those who are ready say that they hold, as their leader knows.

    Whoever signs another entry of its own making each time makes the leader look at few of them: a signature is checked
    first, a verdict is kept for as long as somebody holds the entry, and what most hold is looked at before the rest.
    """

    def __init__(self, log: LogState, certifier: Certifier) -> None:
        self._log = log
        self._certifier = certifier
        self._signed: dict[str, tuple[Held, int, bool]] = {}
        self._follows: dict[bytes, bool | None] = {}
        """By digest; None: not looked at yet."""

    def proven(self, ready: Mapping[str, Ready]) -> dict[Header, list[Holder]]:
        """Return the entries that follow from the log, and who shows its own signature of them."""
        claims = {peer: (said.held, said.incarnation) for peer, said in sorted(ready.items()) if said.held}
        self._signed = {peer: self._look(peer, *claim) for peer, claim in claims.items()}
        holders: dict[Header, list[Holder]] = {}
        for peer, (held, _, is_signed) in self._signed.items():
            if is_signed:
                holder = Holder(peer=peer, attempt=held.attempt, signature=held.signature)
                holders.setdefault(held.header, []).append(holder)
        self._find_followers({header: len(many) for header, many in holders.items()})
        return {header: many for header, many in holders.items() if self._follows.get(header.digest)}

    def _look(self, peer: str, held: Held, incarnation: int) -> tuple[Held, int, bool]:
        """Whether it shows its signature of an entry, as one of those who can sign it: what others sign adds nothing to
        what may be committed, and members would take it for false."""
        known = self._signed.get(peer)
        if known is not None and known[:2] == (held, incarnation):
            return known
        holder = Holder(peer=peer, attempt=held.attempt, signature=held.signature)
        may_sign = signers(self._log, held.header).get(peer) == incarnation
        return held, incarnation, may_sign and is_signed(self._certifier, held.header, holder, incarnation)

    def _find_followers(self, counts: Mapping[Header, int]) -> None:
        """See which of these entries follow from the log, a few more each time: first those that most hold, and of
        equal ones those that have waited for longest. Given is how many hold each."""
        headers = {header.digest: header for header in counts}
        known = {digest: verdict for digest, verdict in self._follows.items() if digest in headers}
        self._follows = known | {digest: None for digest in headers if digest not in known}
        unseen = [headers[digest] for digest, verdict in self._follows.items() if verdict is None]
        for header in sorted(unseen, key=lambda header: counts[header], reverse=True)[:AT_ONCE]:
            self._follows[header.digest] = follows(self._log, header)

    def weightiest(
        self, ready: Mapping[str, Ready], coming: Mapping[str, int], departed: Collection[str], founding: Founding
    ) -> Claim | None:
        """Return which entry must be handed on, if `coming` are those who are not ready and may be yet."""
        present = {peer: said.incarnation for peer, said in ready.items()} | dict(coming)
        least = self._fewest_holders(present, departed)
        claims = [
            Claim(header, self._as_many_as_needed(header, holders), since)
            for header, holders in self.proven(ready).items()
            if len(holders) >= least
            and (since := committed_since(self._log, header, holders, present, departed, founding)) is not None
        ]
        return max(claims, key=lambda claim: claim.since.weight, default=None)

    def _fewest_holders(self, present: Mapping[str, int], departed: Collection[str]) -> int:
        """Return how many must hold an entry, at least, that may have been committed: else half of the voters are
        against it. Of a founding each entry has voters of its own."""
        voters = [peer for peer in self._log.voters if peer not in departed]
        here = sum(present.get(peer) == self._log.incarnations[peer] for peer in voters)
        return max(0, here - (len(voters) - 1) // 2)

    def _as_many_as_needed(self, header: Header, holders: Sequence[Holder]) -> tuple[Holder, ...]:
        """Return the holders that show it best: more signatures than of half of the voters convince nobody more."""
        voters = {peer for peer, _ in electorate(self._log, header)}
        best = sorted(holders, key=lambda holder: (holder.peer in voters, holder.attempt.weight), reverse=True)
        return tuple(sorted(best[: max(len(voters) // 2 + 1, LEAST_HOLDERS)], key=lambda holder: holder.peer))


def follows(log: LogState, header: Header) -> bool:
    """Return whether an entry may be the next one."""
    try:
        log.check_next(header)
    except LogError:
        return False
    return True


class Takeover:
    """A member's view of an entry that a leader hands on. Of one slot."""

    def __init__(self, desk: Desk, presence: Presence, log: LogState, certifier: Certifier, acceptor: Acceptor) -> None:
        self._desk = desk
        self._presence = presence
        self._log = log
        self._certifier = certifier
        self._acceptor = acceptor

    def is_proven(self, adopt: Adopt) -> bool:
        """Return whether all who are said to hold the entry have signed that. An honest leader has checked it."""
        starts = signers(self._log, adopt.header)
        if len({holder.peer for holder in adopt.holders}) < len(adopt.holders):
            return False
        return all(
            holder.peer in starts and is_signed(self._certifier, adopt.header, holder, starts[holder.peer])
            for holder in adopt.holders
        )

    def is_disclaimed(self, held: Held, begin: Begin) -> bool:
        """Return whether what we hold can't have been committed, as those who are ready have signed."""
        departed = self._presence.membership.departed(self._log)
        founding = self._founding(len(begin.round.remaining) >= self._desk.settings.minimum_peers)
        return is_disclaimed(self._certifier, self._log, held, begin, departed, founding)

    def _founding(self, can_be_made: bool) -> Founding:
        """Return what a founding is measured by, where enough are here to make one, or not."""
        return Founding(self._desk.settings.minimum_peers if can_be_made else 1, self._presence.membership.met)

    def objection(self, adopt: Adopt, waited: float) -> str | None:
        """Return why we do not take the entry over, having been ready for so many seconds.

        Whoever sees others than the leader does, and so can't know why it hands an entry on, believes it in the end.
        Farewells that we have heard count for the partition grace: the leader may never hear of them, least of its own.
        """
        held, header = self._acceptor.held, adopt.header
        if held is not None and held.header == header:
            return None
        if not adopt.holders:
            is_skip = header.payload == NO_PAYLOAD and not self._log.closes and held is None
            return None if is_skip else "nobody holds it"
        is_patient = waited < self._desk.schedule.hopeless
        is_early = waited < self._desk.settings.timing.partition_grace
        departed = self._presence.membership.departed(self._log) if is_early else ()
        present, founding = self._present(adopt.attempt.leader), self._founding(is_patient)
        since = committed_since(self._log, header, adopt.holders, present, departed, founding)
        if since is None and is_patient:
            return "it can't have been committed: too many who are here have not signed it"
        since = since or max((holder.attempt for holder in adopt.holders), key=lambda attempt: attempt.weight)
        if held is not None and since.weight < held.attempt.weight:
            return "we hold an entry of a weightier attempt"
        return None

    def _present(self, leader: str) -> dict[str, int]:
        """Return whom we see at work, and could say to the leader that it does not hold the entry: here, or on its way
        to here, since heartbeats come late; or further on, since whoever is will show what was made here."""
        live, position = self._presence.live(), self._log.position
        away = self._presence.unreached
        present = {self._desk.me: self._desk.memory.incarnation}
        for beat in live.at_work:
            is_further = beat.index > position.index and beat.peer not in self._presence.vain
            is_here = beat.head == position.head or beat.index < position.index
            if (is_here or is_further) and beat.peer not in away and not self._says_nothing_to(leader, beat.peer):
                present[beat.peer] = beat.incarnation
        return present

    def _says_nothing_to(self, leader: str, peer: str) -> bool:
        """Return whether a peer says that it can't talk to the leader. What the leader says of that counts for nothing:
        it might have nobody speak but itself."""
        live = self._presence.live()
        return peer in live and leader[-TAIL:] in live[peer].unreached
