"""What proves the entry at one position: puts certificates together, and looks at those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from peers.log.certificate import AttemptName, Certificate, Proof, ballot, certify, electorate, prove, weigh
from peers.log.header import Header
from peers.log.state import LogError, LogState
from peers.protocol.effects import Send
from peers.protocol.messages import Commit
from peers.protocol.rounds import Attempt, Round
from peers.values.identity import Keys

Farewells = Mapping[str, tuple[int, bytes]]
"""Of peers that have left: from which index on, and their signature of that."""

OPEN_LIMIT = 16
"""Members in whose attempts all tell all that they are complete: one delay less, and messages by the square."""
FANOUT = 16
"""Members that each member of a larger attempt tells of its commit: certificates are long."""


class Certifier:
    """Of one position."""

    def __init__(self, keys: Keys, log: LogState, farewells: Callable[[], Farewells]) -> None:
        """`farewells` are those of the last roster."""
        self._keys = keys
        self.verify = keys.verify
        self._log = log
        self._farewells = farewells

    def signed(
        self, header: Header, attempt: AttemptName, signatures: Mapping[str, bytes], least: int = 0
    ) -> dict[str, bytes]:
        """Those of the signatures that count: of this header in this attempt, by who may sign.

        Where as many are good as a certificate needs, and so many at `least`, the others are not looked at. Which these
        are changes from entry to entry: whoever signs another one for somebody else is found only where its signature
        is shown.
        """
        voters, good = electorate(self._log, header), dict[str, bytes]()
        first = int.from_bytes(header.digest[:4]) % max(1, len(voters))
        for peer, incarnation in (*voters[first:], *voters[:first]):
            if peer not in signatures or (2 * len(good) > len(voters) and len(good) >= least):
                continue
            if self._keys.verify(peer, ballot(header, attempt, incarnation).text, signatures[peer]):
                good[peer] = signatures[peer]
        return good

    def certify(self, header: Header, attempt: AttemptName, signed: Mapping[str, bytes]) -> Certificate:
        """Put together all of these signatures, which count."""
        return certify(self._log, header, attempt, signed, self._farewells())

    def weight(self, header: Header, certificate: Certificate) -> Proof:
        """What a certificate proves that was put together here, so that its signatures have been checked."""
        return weigh(certificate, self._log, header)

    def proof(self, header: Header, certificate: Certificate | None) -> Proof | None:
        """What a certificate proves; None where there is none, it is false, or the entry does not follow."""
        if certificate is None:
            return None
        try:
            return prove(certificate, self._log, header, self._keys.verify)
        except LogError:
            return None


def passers(round: Round | None, header: Header) -> Sequence[str]:
    """Return those among whom a commit is passed on: who is in the attempt's round; of an entry that is handed on, its
    own members, as all know them."""
    return round.remaining if round else header.peers


def passed_on(commit: Commit, me: str, attempt: Attempt | None, round: Round | None) -> list[Send]:
    """Return whom a member of a large attempt tells of its commit."""
    if attempt is None:
        return []
    return [Send(peer, commit) for peer in told_by(me, attempt.leader, passers(round, commit.header))]


def told_by(me: str, leader: str, members: Sequence[str]) -> tuple[str, ...]:
    """The members that one member tells of the commit, once it knows of it: a tree, with the leader at its root.

    Whom this does not reach, because somebody between is gone, asks the leader again.
    """
    if len(members) <= OPEN_LIMIT:
        return ()
    order = [leader, *(peer for peer in members if peer != leader)]
    first = order.index(me) * FANOUT + 1 if me in order else len(order)
    return tuple(order[first : first + FANOUT])
