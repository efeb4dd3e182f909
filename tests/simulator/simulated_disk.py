"""A simulated peer's disk, which outlives its processes unless the story takes it away."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from peers.protocol.voting import VotingRecord
from peers.values.chunks import ChunkedPayload
from tests.simulator.simulated_log import Frozen, SimulatedLog

OLDER = 4  # outer steps whose payloads stay


@dataclass
class SimulatedDisk:
    """What a peer has written. A write is on the disk at once and whole, as after fsync and rename.

    `record` has its votes, `frozen` the state after the last whole cycle, `entries` the log up to there, or further.
    """

    record: VotingRecord | None = None
    entries: SimulatedLog | None = None
    frozen: Frozen | None = None
    is_full: bool = False
    _payloads: dict[bytes, tuple[int, ChunkedPayload]] = field(default_factory=dict)  # with their entry's index

    def keep(self, index: int, payload: ChunkedPayload) -> None:
        """Keep the payload of an entry, and drop those that are much older."""
        self._payloads[payload.digest] = index, payload
        for digest, (older, _) in list(self._payloads.items()):
            if older < index - OLDER:
                del self._payloads[digest]

    def payload(self, digest: bytes) -> ChunkedPayload | None:
        """Return a payload that is kept."""
        return self._payloads[digest][1] if digest in self._payloads else None

    @property
    def log(self) -> SimulatedLog | None:
        """Return the log up to the state."""
        if self.entries is None or self.frozen is None or self.frozen.last is None:
            return None
        return self.entries.first(self.frozen.last.index + 1)

    # What a story does to it ----------------------------------------------------------------------------------
    def image(self) -> SimulatedDisk:
        """Return a copy, as a snapshot of a virtual machine has it."""
        return replace(self, entries=self.log, _payloads=dict(self._payloads))

    def set_back(self, image: SimulatedDisk) -> None:
        """Have what an earlier image has, and nothing else."""
        copy = image.image()
        self.record, self.entries, self.frozen, self._payloads = copy.record, copy.entries, copy.frozen, copy._payloads

    def lose(self) -> None:
        """Lose everything."""
        self.set_back(SimulatedDisk())
