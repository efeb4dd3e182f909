"""What members have signed that the entry is, as far as we hear of it: two entries by one peer in an attempt are proof.

Each says it in Complete, to its leader or in an open attempt to all; and the certificate of a commit shows what it has
said to somebody else. What comes when the entry is made is compared, too. Where two branches split, the certificates of
both show it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from peers.log.certificate import Certificate, electorate, prove
from peers.log.header import Header, Position
from peers.log.lineage import Branch
from peers.log.state import LogError, LogState
from peers.protocol.docket import OF_ONE
from peers.protocol.faults import SignedEntry, TwoVotes
from peers.protocol.messages import Commit, Complete
from peers.protocol.rounds import Attempt, Round
from peers.values.identity import Verify

PLACES = 8
"""Places before the present cycle's whose votes are remembered: what was said of an entry may come late, but not for
long."""


class Said(NamedTuple):
    """What somebody says that it has signed, and in which attempt. The rest of its Complete may be long."""

    attempt: Attempt
    entry: SignedEntry

    @classmethod
    def of(cls, complete: Complete) -> Said:
        """If it has signed something else, it has signed nothing."""
        return cls(complete.attempt, SignedEntry(header=complete.entry, signature=complete.signature))


class Votes:
    """Of one place in the log.

    Most members say one thing, and nothing of that is checked: `_first`. What somebody says who has said another thing
    is kept only if it is signed, so that what nobody has signed hides nothing that somebody has.
    """

    def __init__(self, log: LogState, verify: Verify) -> None:
        """`log` is that before the entry."""
        self._log = log
        self._verify = verify
        self._first: dict[str, Said | None] = {}
        self._signed: dict[str, dict[Attempt, SignedEntry]] = {}
        self._made: tuple[Header, Certificate] | None = None

    def hear(self, sender: str, complete: Complete, round: Round | None) -> TwoVotes | None:
        """A voter, or a member of the round under way, says what it has signed. Returns the proof, if it has signed
        another entry in the same attempt."""
        start, said = self._start(sender, round), Said.of(complete)
        if start is None:
            return None
        shown = self._shown(sender, said.attempt)
        if shown is not None and shown.header != said.entry.header:
            return self._proof(sender, start, shown, said)
        if sender not in self._first:
            self._first[sender] = said
            return None
        first = self._first[sender]
        if first == said:
            return None
        if first is not None:
            self._first[sender] = None
            self._keep(sender, start, first)
        return self._keep(sender, start, said)

    def made(self, header: Header, certificate: Certificate) -> None:
        """The entry is made, as this certificate shows, whose signatures have been checked."""
        self._made = header, certificate

    def compare(self, commit: Commit) -> Sequence[TwoVotes]:
        """Return what is proof if what was said to us is signed. The certificate's own signatures are checked where it
        shows anything, and once: else whoever makes one up would have each of them checked."""
        found = list(self._differing(commit))
        if found and commit.certificate is not None:
            try:
                prove(commit.certificate, self._log, commit.header, self._verify)
            except LogError:
                return ()
        return found

    def _differing(self, commit: Commit) -> Iterator[TwoVotes]:
        """Yield the votes in a certificate of which their authors said something else to us."""
        header, certificate, log = commit.header, commit.certificate, self._log
        if certificate is None or log.last is None:
            return
        attempt, voters = self._attempt(certificate), electorate(log, header)
        for vote in certificate.votes:
            peer, start = voters[vote.place] if vote.place < len(voters) else ("", 0)
            first = self._first.get(peer)
            is_first = first is not None and first.attempt == attempt
            said = first.entry if first and is_first else self._signed.get(peer, {}).get(attempt)
            if said is not None and said.header != header.digest:
                shown = SignedEntry(header=header.digest, signature=vote.signature)
                yield TwoVotes(attempt=attempt, member=peer, incarnation=start, first=said, second=shown)

    def _shown(self, peer: str, attempt: Attempt) -> SignedEntry | None:
        """Return what a voter has signed in an attempt, as the certificate of what was made shows."""
        if self._made is None or self._log.last is None or self._attempt(self._made[1]) != attempt:
            return None
        header, certificate = self._made
        voters = electorate(self._log, header)
        signatures = (vote.signature for vote in certificate.votes if voters[vote.place][0] == peer)
        return next((SignedEntry(header=header.digest, signature=signature) for signature in signatures), None)

    def _attempt(self, certificate: Certificate) -> Attempt:
        number, leader, alone = certificate.attempt
        return Attempt(position=self._log.position, number=number, leader=leader, alone=alone)

    def _start(self, peer: str, round: Round | None) -> int | None:
        """Return as which start a peer signs; None where it has nothing to sign."""
        if round is not None and peer in round.peers:
            return round.roster[round.peers.index(peer)].incarnation
        return self._log.incarnations[peer] if peer in self._log.voters else None

    def _keep(self, sender: str, start: int, said: Said) -> TwoVotes | None:
        """Remember what a member has said, if it has signed that. Returns what it proves."""
        kept = self._signed.setdefault(sender, {})
        known = kept.get(said.attempt)
        if known is not None and known.header == said.entry.header:
            return None
        proof = self._proof(sender, start, known or said.entry, said)
        if proof is None or known is not None:
            return proof
        kept[said.attempt] = said.entry
        if len(kept) > OF_ONE:
            del kept[next(iter(kept))]
        return None

    def _proof(self, sender: str, start: int, known: SignedEntry, said: Said) -> TwoVotes | None:
        """Return what shows both, if the sender has signed what it says now."""
        proof = TwoVotes(attempt=said.attempt, member=sender, incarnation=start, first=known, second=said.entry)
        return proof if self._verify(sender, proof.said[1].text, said.entry.signature) else None


class Polls:
    """The votes at the present cycle's places and at those before, also when their entries are made."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._votes: OrderedDict[tuple[bytes, int], Votes] = OrderedDict()

    def open(self, log: LogState) -> Votes:
        """Return what was heard at the end of this log, and is heard there from now on."""
        place = log.position.head, log.position.fragment
        votes = self._votes.setdefault(place, Votes(log, self._verify))
        self._votes.move_to_end(place)
        while len(self._votes) > PLACES + log.fragments:
            self._votes.popitem(last=False)
        return votes

    def at(self, position: Position) -> Votes | None:
        """Return what was heard there, if that is remembered."""
        return self._votes.get((position.head, position.fragment))


def signed_both(one: Branch, other: Branch) -> Iterator[TwoVotes]:
    """Yield what proves that somebody has signed, in one attempt, both of the entries with which two branches split.
    Each founding has voters of its own, so that of two of them nothing is proven."""
    log = one.start
    shown = [branch.first.keys() & branch.certificates.keys() for branch in (one, other)]
    for fragment in sorted(shown[0] & shown[1] if log.last is not None else ()):
        first, second = one.certificates[fragment], other.certificates[fragment]
        headers = one.first[fragment][0], other.first[fragment][0]
        if headers[0] == headers[1] or first.attempt != second.attempt:
            continue
        number, leader, alone = first.attempt
        attempt = Attempt(position=log.of(fragment).position, number=number, leader=leader, alone=alone)
        signatures = {vote.place: vote.signature for vote in second.votes}
        for vote in first.votes:
            if vote.place in signatures:
                peer = log.voters[vote.place]
                said = [
                    SignedEntry(header=header, signature=signature)
                    for header, signature in zip(headers, (vote.signature, signatures[vote.place]), strict=True)
                ]
                start = log.incarnations[peer]
                yield TwoVotes(attempt=attempt, member=peer, incarnation=start, first=said[0], second=said[1])
