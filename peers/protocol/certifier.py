"""What proves the entry at one position: puts certificates together, and looks at those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from peers.log.certificate import Ballot, Certificate, Proof, certify, electorate, prove
from peers.log.header import Header
from peers.log.state import LogError, LogState
from peers.values.signing import Keys

Farewells = Mapping[str, tuple[int, bytes]]
"""Of peers that have left: from which index on, and their signature of that."""

OPEN_LIMIT = 16
"""Members in whose attempts all tell all that they are complete: one delay less, and messages by the square."""
FANOUT = 8
"""Members that each member of a larger attempt tells of its commit: certificates are long."""
NOTHING = Proof(is_certified=False, signers=0)


class Certifier:
    """Of one position."""

    def __init__(self, keys: Keys, log: LogState, farewells: Callable[[], Farewells]) -> None:
        """`farewells` are those of the last roster."""
        self._keys = keys
        self._log = log
        self._farewells = farewells

    def signed(self, header: Header, attempt: tuple[int, str], signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those of the signatures that count: of this header in this attempt (number and leader), by who may sign."""
        number, leader = attempt
        good = dict[str, bytes]()
        for peer, incarnation in electorate(self._log, header):
            ballot = Ballot(header=header.digest, number=number, leader=leader, incarnation=incarnation)
            if peer in signatures and self._keys.verify(peer, ballot.text, signatures[peer]):
                good[peer] = signatures[peer]
        return good

    def certify(self, header: Header, attempt: tuple[int, str], signatures: Mapping[str, bytes]) -> Certificate:
        """Put together what members said. False signatures are left out."""
        return certify(self._log, header, attempt, self.signed(header, attempt, signatures), dict(self._farewells()))

    def proof(self, header: Header, certificate: Certificate | None) -> Proof:
        """What a certificate proves; nothing, if it is false, or the entry does not follow."""
        if certificate is None:
            return NOTHING
        try:
            return prove(certificate, self._log, header, self._keys.verify)
        except LogError:
            return NOTHING


def told_by(me: str, leader: str, members: Sequence[str]) -> tuple[str, ...]:
    """The members that one member tells of the commit, once it knows of it: a tree, with the leader at its root.

    Whom this does not reach, because somebody between is gone, asks the leader again.
    """
    if len(members) <= OPEN_LIMIT:
        return ()
    order = [leader, *(peer for peer in members if peer != leader)]
    first = order.index(me) * FANOUT + 1 if me in order else len(order)
    return tuple(order[first : first + FANOUT])
