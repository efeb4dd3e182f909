"""What must hold of a whole swarm, checked from outside after every step of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peers.log.certificate import Certificate, prove
from peers.log.header import Header
from peers.log.settings import RunSettings
from peers.log.state import LogState
from peers.values.manifest import Amendment
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.simulated_workload import GENESIS, stepped

Place = tuple[bytes, frozenset[bytes]]
"""The head of a cycle, and the digests of those of its entries that are applied."""


class InvariantError(AssertionError):
    """What must never happen has happened; the message names it, the trace leads there."""


class History:
    """Every entry and every state that any honest peer of a swarm has had.

    `one_child`: whether a second entry at a position is an error, as it is until a partition grace has run out. A
    second certified one always is.
    """

    def __init__(self, settings: RunSettings, one_child: bool = True) -> None:
        self.one_child = one_child
        self.may_fork = False
        """Whether two certified entries at a place are noted in `forks` and no error: so many lie that they may be."""
        self.forks: list[int] = []
        """The index of each place with two certified entries."""
        self.liars: frozenset[str] = frozenset()
        self.states: dict[Place, tuple[bytes, ...]] = {
            (settings.manifest_digest, frozenset()): (GENESIS,) * settings.fragments
        }
        self.children: dict[tuple[bytes, int], bytes] = {}
        self.proven: dict[tuple[bytes, int], bytes] = {}
        self.trained: dict[bytes, set[int]] = {}
        self.counted: Counter[str] = Counter()
        """Tokens that count of each peer, in all lineages together."""
        self.named: Counter[str] = Counter()
        """Faults by their kind, once for each peer that has applied their entry."""
        self.refuted: Counter[str] = Counter()
        """How often the averages of each peer were found to be wrong."""
        self.amendments: dict[bytes, Amendment | None] = {}
        """What is in force in the cycle that follows a head."""
        self.longest = 0
        self.smallest_roster = 0
        self._keys = SimulatedKeys("")

    def derive(self, header: Header, log: LogState, payload: bytes | None) -> None:
        """Somebody applies an entry, whoever it is: note which state follows from those before and the payload."""
        entries = frozenset(entry.digest for entry in log.made) or frozenset(log.ends)
        before = self.states.get((header.previous, entries - {header.digest}))
        place = _place(log)
        if before is None or place in self.states:
            return
        states = list(before)
        if payload is not None:
            amendment = self.amendments.get(header.previous)
            states[header.fragment] = stepped(states[header.fragment], payload, amendment)
        if not log.made:
            self.amendments[log.position.head] = log.amendment
        self.states[place] = tuple(states)

    def certified(self, header: Header, certificate: Certificate | None, before: LogState | None) -> None:
        """An honest peer applies an entry with this certificate. One certified child per place, but for the first
        place: before it is no roster, and whoever is tired of waiting may found the run.

        Raises: InvariantError, and CertificateError when a signature in it is false.
        """
        place = header.previous, header.fragment
        if certificate is None or before is None or before.last is None or self.proven.get(place) == header.digest:
            return
        if not prove(certificate, before.opening(header.fragment), header, self._keys.verify).is_certified:
            return
        known = self.proven.setdefault(place, header.digest)
        if known != header.digest and self.may_fork:
            self.forks.append(header.index)
        elif known != header.digest:
            names = f"{known.hex()[:8]}, {header.digest.hex()[:8]}"
            raise InvariantError(f"two certified entries at index {header.index}: {names}")

    def record(self, header: Header, log: LogState) -> None:
        """An entry is applied, which leads to this log. One child per place, no sample twice in a lineage, somebody
        honest counts in it, and nobody honest is named in its annex.

        Raises: InvariantError.
        """
        known = self.children.setdefault((header.previous, header.fragment), header.digest)
        if self.one_child and known != header.digest:
            raise InvariantError(f"two entries at index {header.index}: {known.hex()[:8]}, {header.digest.hex()[:8]}")
        if framed := {fault.peer for fault in header.faults} - self.liars:
            raise InvariantError(f"entry {header.index} excludes {', '.join(sorted(framed))}, though honest")
        self.named.update(fault.kind for fault in header.faults)
        head, closing = log.position.head, log.last
        if log.made or closing is None or head in self.trained:
            return  # in the midst of a cycle, or another peer was here before: it is checked
        before = self.trained.get(closing.previous, set())
        trained = [member for member in closing.roster if log.has_trained(member)]
        samples = [n for member in trained for piece in member.samples for n in range(piece.start, piece.stop)]
        if len(set(samples)) != len(samples) or before & set(samples):
            raise InvariantError(f"entry {closing.index} trains a sample twice")
        if self.liars.issuperset(member.peer for member in closing.roster if member.tokens):
            raise InvariantError(f"entry {closing.index} counts nobody but liars")
        self.trained[head] = before | set(samples)
        self.counted.update({member.peer: member.tokens for member in closing.roster})
        self.longest = max(self.longest, closing.index + 1)
        self.smallest_roster = min(self.smallest_roster or len(closing.roster), len(closing.roster))

    def refute(self, peer: str, reducer: str) -> None:
        """An honest peer has made an average again, and another one than its reducer gave.

        Raises: InvariantError where that one is honest, too.
        """
        if reducer not in self.liars:
            raise InvariantError(f"{peer} finds that {reducer} has averaged wrongly, though honest")
        self.refuted[reducer] += 1

    def check(self, peer: str, log: LogState, states: Sequence[bytes]) -> None:
        """An honest peer is at the end of this log with these states: those that the log's entries lead to.

        Raises: InvariantError.
        """
        derived = self.states.get(_place(log))
        if derived is None:
            raise InvariantError(f"{peer} is at {log.position}, where no entries lead")
        if derived != tuple(states):
            raise InvariantError(f"{peer} has another state at {log.position}")


def _place(log: LogState) -> Place:
    return log.position.head, frozenset(entry.digest for entry in log.made)
