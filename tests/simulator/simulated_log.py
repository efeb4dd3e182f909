"""The whole log of a simulated peer and how it compares with another one's; and the states that it gives to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.log.certificate import Certificate
from peers.log.header import Header, Position
from peers.log.lineage import RECENT_ENTRIES, Branch, Lineage, Walk
from peers.log.state import LogError, LogState
from peers.protocol.events import SnapshotRestored
from peers.transfer.snapshots import Offered, SnapshotOffer
from peers.values.identity import Verify
from tests.simulator.simulated_workload import digest_of_states


@dataclass(frozen=True)
class Frozen:
    """The state after a whole cycle, which `last` closed; `ends` are the digests of its entries."""

    last: Header | None
    ends: tuple[bytes, ...]
    states: tuple[bytes, ...]


class SimulatedShelf:
    """A peer's newest state, and the one that it gives to others."""

    def __init__(self, empty_log: LogState, newest: Frozen) -> None:
        self.newest = newest
        self.given: Frozen | None = None
        self._empty_log = empty_log

    def take(self, newest: Frozen, is_chosen: bool) -> None:
        """Whether it is given from now on, or only to who needs one as new."""
        self.newest = newest
        if is_chosen:
            self.given = newest

    def frozen(self, least: int) -> Frozen:
        """The state frozen last, or the newest one if that is older than `least`."""
        if self.given is None or self.place(self.given).index < least:
            self.given = self.newest
        return self.given

    def offer(self, frozen: Frozen) -> Offered:
        offer = SnapshotOffer.model_construct(last=frozen.last, bytes=0, state_digest=digest_of_states(frozen.states))
        return Offered(offer, self.place(frozen), ())

    def place(self, frozen: Frozen) -> Position:
        """Where in the log it is."""
        return self._empty_log.at(frozen.last, frozen.ends).position


class SimulatedLog:
    """Entries in the order in which they were applied, each with what proves it."""

    def __init__(self, empty_log: LogState) -> None:
        self._entries: list[tuple[Header, Certificate | None]] = []
        self._starts = [(empty_log, 0)]  # the log when each cycle began, and how many entries that are

    def append(self, header: Header, certificate: Certificate | None, log: LogState) -> None:
        """`log` is where the entry leads."""
        self._entries.append((header, certificate))
        if not log.made:
            self._starts.append((log, len(self._entries)))

    @property
    def heads(self) -> tuple[bytes, ...]:
        """What names the log before each cycle."""
        return tuple(start.position.head for start, _ in self._starts)

    def until(self, position: Position) -> SimulatedLog:
        """Return the log up to the cycle that begins there."""
        return self.first(position.index)

    def first(self, cycles: int) -> SimulatedLog:
        """Return the log up to the end of so many cycles."""
        whole = SimulatedLog(self._starts[0][0])
        whole._starts = self._starts[: cycles + 1]
        whole._entries = self._entries[: whole._starts[-1][1]]
        return whole

    def lineage(self) -> Lineage:
        """Return what a peer knows of the log that starts again with it."""
        log = self._starts[0][0]
        lineage = Lineage(log)
        for header, certificate in self._entries:
            log = log.append(header)
            lineage.append(header, log, certificate)
        return lineage

    def branches(self, theirs: SimulatedLog, verify: Verify) -> tuple[Branch, Branch]:
        """Return what follows there and here, from the last cycle on that both begin with, and the places before."""
        pairs = zip(self._starts, theirs._starts, strict=False)
        common = [place for place, ((one, _), (other, _)) in enumerate(pairs) if one.position == other.position][-1]
        start, here = self._starts[common]
        return (
            _walked(start, theirs._entries[theirs._starts[common][1] :], verify).preceded_by(0, self.heads),
            _walked(start, self._entries[here:], verify).preceded_by(0, self.heads),
        )


def restored(donor: str, frozen: Frozen, branch: Branch, doubt: LogState | None) -> SnapshotRestored:
    """What a peer is told that has taken over a state, for which this branch vouches. `doubt` is its own log's."""
    index = frozen.last.index + 1 if frozen.last else 0
    state_digest, doubt = digest_of_states(frozen.states), branch.doubt_before(index, doubt)
    heads = tuple(branch.heads[index] for index in sorted(branch.heads)[-RECENT_ENTRIES:] if index)
    return SnapshotRestored(donor, frozen.last, state_digest, heads, frozen.ends, doubt)


def _walked(start: LogState, entries: Sequence[tuple[Header, Certificate | None]], verify: Verify) -> Branch:
    """As far as it holds up."""
    walk = Walk(start, verify)
    try:
        for header, certificate in entries:
            walk.take(header, certificate)
    except LogError:
        pass
    return walk.branch()
