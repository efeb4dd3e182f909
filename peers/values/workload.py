"""What the swarm asks of the training side. Bytes and counts only: peers never learns what the numbers mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from peers.values.chunks import PayloadSize, Sum
from peers.values.leases import SampleRange
from peers.values.manifest import Amendment, LoggedAmendment
from peers.values.wire import Buffer

Blocks: TypeAlias = Buffer
"""Whole blocks of a payload."""
Inspect: TypeAlias = Callable[[int, Blocks, int], float]
"""Returns the squared norm of a chunk in a format. Raises: BadBlocksError when these bytes are no such chunk."""


@dataclass(frozen=True)
class PayloadKind:
    """What there is to know of one fragment's payloads: how large they are, and what measures their chunks."""

    size: PayloadSize
    inspect: Inspect


OnCaptured: TypeAlias = Callable[[int], Awaitable[None]]
"""Told of a fragment whose local values have been stored by all workers of the machine."""


async def captures_nothing(fragment: int) -> None:
    """Of a run with one fragment, nothing is captured before training ends."""


@dataclass(frozen=True)
class InnerLoop:
    """What one peer trains for one outer step: from the theta after `index` entries, at most `steps` inner steps on a
    lease's samples, in their order. `tokens` is what the log's lineage has trained before that, and `amendments` are
    what it has taken in until then: the last one is in force in that outer step, also for work that comes late."""

    index: int
    samples: tuple[SampleRange, ...]
    steps: int
    tokens: int
    amendments: tuple[LoggedAmendment, ...] = ()

    @property
    def amendment(self) -> Amendment | None:
        """The amendment in force."""
        return self.amendments[-1].amendment if self.amendments else None


@dataclass(frozen=True)
class Progress:
    """How far the worker is within one outer step; published in heartbeats. `loss` is None where it is not known.

    `inner_step` is 0 for the last inner steps of an overlap, which come when what is trained is known already.
    `step_tokens` are what an inner step trains on average, where that is not the run's batch.
    """

    inner_step: int
    loss: float | None
    tokens_per_second: float
    step_tokens: float | None = None


@dataclass(frozen=True)
class Trained:
    """What one outer step's inner steps come to: the samples trained (a prefix of the lease) and the tokens in them.

    `contribution` is the root over the chunks of its pseudo-gradient, once that is quantized in a `format`.
    """

    samples: tuple[SampleRange, ...]
    tokens: int
    loss: float
    contribution: Sum | None = field(default=None, kw_only=True)
    format: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Reduction:
    """What there is to average for outer step `index`: checked blocks of a fragment, from `first_block` on, each with
    its owner's weight, in the format that `formats` has at its place; without `formats`, in the average's.

    Weights are tokens, or less for a contribution that is old or clipped; the sum is divided by `tokens`, which is the
    sum of the weights before anything is clipped, and by default the sum of the weights. The average may lie in `out`,
    which has as many bytes as it takes.
    """

    contributions: Sequence[tuple[Blocks, float]]
    first_block: int
    out: memoryview | None = None
    tokens: float | None = None
    fragment: int = 0
    index: int = 0
    formats: Sequence[int] = ()


class Blocked(Protocol):
    """How the payloads of one fragment are cut into blocks. Averages are in format 0; contributions are in any format,
    of which later ones are smaller. A block holds the same values in each."""

    @property
    def block_count(self) -> int:
        """Number of blocks in a payload."""

    @property
    def format_count(self) -> int:
        """Number of formats in which a peer may contribute."""

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        """Byte offsets [start, stop) of blocks [first_block, last_block) within a payload."""

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raises: BadBlocksError when these bytes are not whole blocks from `first_block` on that an encoder makes."""


class ReplicatedState(Protocol):
    """The state machine that the log drives: momentum and theta. It is all that following a run takes.

    Calls are never concurrent.
    """

    @property
    def fragments(self) -> Sequence[Blocked]:
        """How each fragment's payloads are cut up. Plain DiLoCo has one fragment."""

    async def apply(
        self, payload: Blocks, index: int, fragment: int = 0, *, amendment: Amendment | None = None
    ) -> None:
        """Take outer step `index` of one fragment from the payload's bytes, whole or not at all, with what the
        `amendment` sets that the log has in force there; None: with the manifest's values.

        Raises: BadBlocksError, and changes nothing.
        """

    async def state_digest(self) -> bytes:
        """Return the digest of momentum and theta, 32 bytes: the same on every peer at one log position. See
        `digest_of_state`."""

    @property
    def state_size(self) -> int:
        """Bytes of momentum and theta together."""

    async def copy_state(self, out: memoryview) -> None:
        """Write momentum's bytes, then theta's."""

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Replace momentum and theta. Raises: SnapshotError, and changes nothing, when these bytes are not the state
        with that digest."""


class Workload(ReplicatedState, Protocol):
    """The replicated state and the worker that trains from it.

    A payload is a sequence of `block_count` independently decodable blocks. `reduce` reads neither theta nor
    momentum and may run beside anything, `copy_state` and `state_digest` beside `run_inner_loop` and `reduce`,
    `copy_state` also beside `contribution`, and `apply` beside `run_inner_loop` once it has reported progress; other
    calls are never concurrent. Of a run with several fragments, `contribution` and `unchanged` may also run beside
    `run_inner_loop`.
    """

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        """Load theta into the worker and train. Cancelling stops the worker within an inner step.

        For each fragment but the last one `on_captured` is awaited: all workers have stored what they have learned of
        it. Of the last fragment that is so when this returns. In a run with an overlap the worker then still takes its
        last inner steps, before all else that it is asked to do."""

    async def contribution(self, fragment: int = 0, format: int = 0) -> Blocks:
        """Return the pseudo-gradient of a fragment quantized in a format, a whole payload: the theta that its training
        began with, less local. Once for each time that it is captured. The bytes may lie where those of the call before
        lay."""

    async def reduce(self, reduction: Reduction) -> Blocks:
        """Return the average of the blocks: in fp32, in their order, weighted; quantized once.

        Raises: BadBlocksError or DilocoPeerError when there is no such average; if so, there is none of more of them,
        too.
        """

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        """Return the sum of the squares of what a fragment's blocks in a format, from `first_block` on, decode to, the
        same bits everywhere.

        Raises: BadBlocksError when these bytes are not whole blocks, or not what an encoder makes.
        """

    async def apply(
        self,
        payload: Blocks,
        index: int,
        fragment: int = 0,
        keeps_work: bool = False,
        counts: bool = True,
        *,
        amendment: Amendment | None = None,
    ) -> None:
        """See `ReplicatedState.apply`. With `keeps_work`, what is being trained, or has been, goes on counting from the
        theta that it began with. `counts`: what this peer has contributed is in the average."""

    async def unchanged(self, index: int, fragment: int) -> None:
        """Hear that outer step `index` leaves a fragment as it is, since nobody had trained it: whoever waits for it
        goes on."""


class BadBlocksError(Exception):
    """Bytes from a peer that are not blocks of a payload."""


class SnapshotError(Exception):
    """Bytes that are not the state that they should be."""
