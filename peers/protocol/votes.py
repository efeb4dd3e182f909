"""What members have signed that the entry is, as far as we hear of it: two entries by one peer in an attempt are proof.

Each says it in Complete, to its leader or in an open attempt to all; and the certificate of a commit shows what it has
said to somebody else. Where two branches split, the certificates of both show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from peers.log.branch import Branch
from peers.log.certificate import electorate, prove
from peers.log.state import LogError, LogState
from peers.protocol.docket import OF_ONE
from peers.protocol.faults import SignedEntry, TwoVotes
from peers.protocol.messages import Commit, Complete, Missed
from peers.protocol.rounds import Attempt, Round
from peers.values.signing import Verify


class Votes:
    """Of one slot.

    Most members say one thing, and nothing of that is checked: `_first`. What somebody says who has said another thing
    is kept only if it is signed, so that what nobody has signed hides nothing that somebody has.
    """

    def __init__(self, log: Callable[[], LogState], verify: Verify) -> None:
        """`log` is that before the entry, in the state that we have."""
        self._log = log
        self._verify = verify
        self._first: dict[str, Complete | None] = {}
        self._signed: dict[str, dict[Attempt, SignedEntry]] = {}

    def hear(self, sender: str, complete: Complete, round: Round) -> TwoVotes | None:
        """A member of the round says what it has signed. Returns the proof, if it has signed another entry before in
        the same attempt."""
        if sender not in self._first:
            self._first[sender] = complete
            return None
        first = self._first[sender]
        if first == complete:
            return None
        if first is not None:
            self._first[sender] = None
            self._keep(sender, first, round)
        return self._keep(sender, complete, round)

    def compare(self, commit: Commit, round: Round) -> Sequence[TwoVotes]:
        """Return what is proof if what was said to us is signed. The certificate's own signatures are checked where it
        shows anything, and once: else whoever makes one up would have each of them checked."""
        found = list(self._differing(commit, round))
        if found and commit.certificate is not None:
            try:
                prove(commit.certificate, self._log(), commit.header, self._verify)
            except LogError:
                return ()
        return found

    def _differing(self, commit: Commit, round: Round) -> Iterator[TwoVotes]:
        """Yield the votes in a certificate of which their authors said something else to us."""
        header, certificate, log = commit.header, commit.certificate, self._log()
        if certificate is None or log.last is None:
            return
        number, leader, alone = certificate.attempt
        attempt = Attempt(position=commit.position, number=number, leader=leader, alone=alone)
        voters = electorate(log, header)
        entries: dict[tuple[bytes, Missed], bytes | None] = {}  # what most say alike is looked at once
        for vote in certificate.votes:
            peer, start = voters[vote.place] if vote.place < len(voters) else ("", 0)
            first = self._first.get(peer)
            if first is not None and first.attempt == attempt:
                outcome = first.payload, first.missed
                if outcome not in entries:
                    entries[outcome] = self._entry(first, round)
                said = _signed(entries[outcome], first.signature)
            else:
                said = self._signed.get(peer, {}).get(attempt)
            if said is not None and said.header != header.digest:
                shown = SignedEntry(header=header.digest, signature=vote.signature)
                yield TwoVotes(attempt=attempt, member=peer, incarnation=start, first=said, second=shown)

    def _keep(self, sender: str, complete: Complete, round: Round) -> TwoVotes | None:
        """Remember what a member has said, if it has signed that. Returns what it proves."""
        start = next((member.incarnation for member in round.roster if member.peer == sender), 0)
        said, kept = _signed(self._entry(complete, round), complete.signature), self._signed.setdefault(sender, {})
        known = kept.get(complete.attempt)
        if said is None or (known is not None and known.header == said.header):
            return None
        proof = TwoVotes(attempt=complete.attempt, member=sender, incarnation=start, first=known or said, second=said)
        if not self._verify(sender, proof.said[1].text, said.signature):
            return None
        if known is not None:
            return proof
        kept[complete.attempt] = said
        if len(kept) > OF_ONE:
            del kept[next(iter(kept))]
        return None

    def _entry(self, said: Complete, round: Round) -> bytes | None:
        """Return the digest of the entry that a member has signed when it said so; None where none comes of that."""
        with suppress(LogError):
            return round.entry(self._log(), dict(said.missed), said.payload).digest
        return None


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


def _signed(header: bytes | None, signature: bytes) -> SignedEntry | None:
    return None if header is None else SignedEntry(header=header, signature=signature)
