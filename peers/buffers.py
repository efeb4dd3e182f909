"""Where the blocks of a round lie while they come and go: memory only, used by every driver.

At most four payloads: our own contribution, everybody's blocks of our part, the averaged payload, and the one held from
before; while blocks are under way, room for one more copy of those that come in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peers.events import OpenRound
from peers.messages import Attempt
from peers.wire import digest_of
from peers.workload import Workload


def part_blocks(block_count: int, owners: int, part: int) -> tuple[int, int]:
    """Blocks [first, last) of a part: an even split, in order."""
    return block_count * part // owners, block_count * (part + 1) // owners


@dataclass
class Round:
    """The blocks of one attempt."""

    opened: OpenRound
    own: bytes = b""
    contributions: dict[str, bytes] = field(default_factory=dict)
    parts: dict[int, bytes] = field(default_factory=dict)
    arriving: dict[tuple[str, int, bool], bytearray] = field(default_factory=dict)  # by sender, part, reduced

    def room_for(self, sender: str, part: int, reduced: bool, length: int) -> bytearray:
        """Where blocks are received: the same bytes for every push of them, however many are under way at once."""
        key = sender, part, reduced
        if key not in self.arriving:
            self.arriving[key] = bytearray(length)
        return self.arriving[key]

    def blocks(self, block_count: int, part: int) -> tuple[int, int]:
        return part_blocks(block_count, len(self.opened.owners), part)


class RoundBuffers:
    """The present attempt's blocks, and the payload held from the last complete one."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._round: Round | None = None
        self._held: tuple[bytes, bytes] | None = None  # digest, payload

    def open(self, opened: OpenRound) -> bool:
        """Begin an attempt. Returns whether it hands on the payload that we hold."""
        self._round = Round(opened)
        if opened.adopted is not None and self._held is not None and self._held[0] == opened.adopted:
            self._round.parts[0] = self._held[1]
            return True
        return False

    def current(self, attempt: Attempt) -> Round | None:
        return self._round if self._round and self._round.opened.attempt == attempt else None

    def contribution(self, attempt: Attempt, part: int) -> bytes:
        """Our own blocks of a part. Raises: KeyError when the attempt is over."""
        current = self._current_or_raise(attempt)
        start, stop = self.part_bytes(attempt, part)
        return current.own[start:stop]

    def ordered_contributions(self, attempt: Attempt, part: int) -> list[tuple[bytes, int]]:
        """Everybody's blocks of our part with their tokens, in roster order."""
        current = self._current_or_raise(attempt)
        start, stop = self.part_bytes(attempt, part)
        mine = current.own[start:stop]
        return [(current.contributions.get(member.peer, mine), member.tokens) for member in current.opened.roster]

    def part_bytes(self, attempt: Attempt, part: int) -> tuple[int, int]:
        """Byte offsets [start, stop) of a part in the payload."""
        first, last = self._current_or_raise(attempt).blocks(self._workload.block_count, part)
        return self._workload.byte_range(first, last)

    def first_block(self, attempt: Attempt, part: int) -> int:
        return self._current_or_raise(attempt).blocks(self._workload.block_count, part)[0]

    def part(self, attempt: Attempt, part: int) -> bytes:
        return self._current_or_raise(attempt).parts[part]

    def hold(self, attempt: Attempt) -> bytes:
        """All parts are here: keep them as the payload held, unless they are not what was to be handed on.

        Returns their digest.
        """
        current = self._current_or_raise(attempt)
        payload = b"".join(current.parts[part] for part in range(len(current.opened.owners)))
        digest = digest_of(payload)
        if current.opened.adopted in (None, digest):
            self._held = (digest, payload)
        return digest

    def held(self, digest: bytes) -> bytes:
        """The payload with this digest. Raises: KeyError when it is not the one held."""
        if self._held is None or self._held[0] != digest:
            raise KeyError(digest.hex())
        return self._held[1]

    def _current_or_raise(self, attempt: Attempt) -> Round:
        current = self.current(attempt)
        if current is None:
            raise KeyError(f"attempt {attempt} is over")
        return current
