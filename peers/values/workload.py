"""The interface between the training side and the package `peers`, which handles bytes and counts only and does not
interpret the numbers."""

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
"""Returns the squared norm of a chunk in a format. Raises: BadBlocksError when the bytes are no such chunk."""


@dataclass(frozen=True)
class PayloadKind:
    """The size of one fragment's payloads, and the function that checks a chunk and returns its squared norm."""

    size: PayloadSize
    inspect: Inspect


OnCaptured: TypeAlias = Callable[[int], Awaitable[None]]
"""Called with a fragment once all workers of the machine have stored its local values."""


async def captures_nothing(fragment: int) -> None:
    """Do nothing after a capture of this fragment. It is the default for a run with one fragment, whose only capture is
    at the end of the training."""


@dataclass(frozen=True)
class InnerLoop:
    """One peer's training for one outer step: at most `steps` inner steps on a lease's samples, in order, from theta
    after `index` outer steps.

    `tokens` is the number of tokens trained before in the log's lineage. `amendments` are all in the log so far; the
    last one is in force in the outer step, even for work that is finished late.
    """

    index: int
    samples: tuple[SampleRange, ...]
    steps: int
    tokens: int
    amendments: tuple[LoggedAmendment, ...] = ()

    @property
    def amendment(self) -> Amendment | None:
        """The amendment in force in this outer step; None if there is none."""
        return self.amendments[-1].amendment if self.amendments else None


@dataclass(frozen=True)
class Progress:
    """The progress of the workers in one outer step, as heartbeats publish it. `loss` is None if unknown.

    `inner_step` is 0 for the last inner steps of an overlap, whose work is reported already. `step_tokens` is the
    average number of tokens in an inner step, if that is not the run's batch.
    """

    inner_step: int
    loss: float | None
    tokens_per_second: float
    step_tokens: float | None = None


@dataclass(frozen=True)
class Trained:
    """The result of one outer step's training: the trained samples (a prefix of the lease), the number of their tokens,
    and the loss.

    `contribution` is the root over the chunks of its pseudo-gradient, once that is quantized in a `format`.
    """

    samples: tuple[SampleRange, ...]
    tokens: int
    loss: float
    contribution: Sum | None = field(default=None, kw_only=True)
    format: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Reduction:
    """The blocks to average for outer step `index`: checked blocks of a fragment, from `first_block` on, each with its
    owner's weight. `formats` has the format of each; if it is empty, all are in the average's format.

    Weights are tokens, or less for a contribution that is old or clipped. The sum is divided by `tokens`, the sum of
    the weights before clipping; by default it is the sum of the weights. The average may be written to `out`, which has
    the right size.
    """

    contributions: Sequence[tuple[Blocks, float]]
    first_block: int
    out: memoryview | None = None
    tokens: float | None = None
    fragment: int = 0
    index: int = 0
    formats: Sequence[int] = ()


class Blocked(Protocol):
    """The blocks of one fragment's payloads. Averages are in format 0; contributions are in any format, and later
    formats are smaller. A block holds the same values in each format."""

    @property
    def block_count(self) -> int:
        """The number of blocks in a payload."""

    @property
    def format_count(self) -> int:
        """The number of formats in which a peer may send contributions."""

    def byte_range(self, first_block: int, last_block: int, format: int = 0) -> tuple[int, int]:
        """Return the byte offsets [start, stop) of blocks [first_block, last_block) within a payload."""

    def check(self, blocks: Blocks, first_block: int) -> None:
        """Raise BadBlocksError unless these bytes are whole blocks, from `first_block` on, that an encoder can make."""


class ReplicatedState(Protocol):
    """The state that the entries of the log determine: momentum and theta. A follower of a run needs only this
    interface. Callers never make two calls at once."""

    @property
    def fragments(self) -> Sequence[Blocked]:
        """The blocks of each fragment's payloads, by fragment. Plain DiLoCo has one fragment."""

    async def apply(
        self, payload: Blocks, index: int, fragment: int = 0, *, amendment: Amendment | None = None
    ) -> None:
        """Apply outer step `index` to one fragment with the averaged payload, whole or not at all. `amendment` is the
        one in force; None for the manifest's values.

        Raises:
            BadBlocksError: the payload is invalid; nothing is changed.
        """

    async def state_digest(self) -> bytes:
        """Return the digest of momentum and theta, 32 bytes: the same on every peer at one position of the log. See
        `digest_of_state`."""

    @property
    def state_size(self) -> int:
        """The number of bytes of momentum and theta together."""

    async def copy_state(self, out: memoryview) -> None:
        """Write momentum's bytes, then theta's, to `out`."""

    async def restore(self, state: Blocks, state_digest: bytes) -> None:
        """Replace momentum and theta by those in `state`. Raises: SnapshotError, with nothing changed, unless these
        bytes have the digest `state_digest`."""


class Workload(ReplicatedState, Protocol):
    """The replicated state, together with the workers that train from it.

    A payload is a sequence of `block_count` independently decodable blocks. Some calls may be concurrent, all others
    never are. `reduce` reads neither theta nor momentum, and may run beside anything. `copy_state` and `state_digest`
    may run beside `run_inner_loop` and `reduce`, and `copy_state` also beside `contribution`. `apply` may run beside
    `run_inner_loop` once that has reported progress. In a run with several fragments, `contribution` and `unchanged`
    may also run beside `run_inner_loop`.
    """

    async def run_inner_loop(
        self, work: InnerLoop, on_progress: Callable[[Progress], None], on_captured: OnCaptured = captures_nothing
    ) -> Trained:
        """Load theta into the workers, train, and return the result. If the caller cancels this call, the workers stop
        within one inner step.

        `on_captured` is awaited for each fragment but the last, once all workers have stored its local values. Those of
        the last fragment are stored when this returns. In a run with an overlap the workers then still take their last
        inner steps, before all other requests.
        """

    async def contribution(self, fragment: int = 0, format: int = 0) -> Blocks:
        """Return a fragment's pseudo-gradient as a payload in a format: theta before its training, minus the local
        values. Called once each time the workers have stored these. The bytes may reuse the previous call's memory."""

    async def reduce(self, reduction: Reduction) -> Blocks:
        """Return the weighted average of the blocks: summed in fp32, in their order, and quantized once.

        Raises:
            BadBlocksError, DilocoPeerError: there is no such average; then there is none of more blocks, either.
        """

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0, format: int = 0) -> float:
        """Return the sum of squares of the decoded values of a fragment's blocks, from `first_block` on. The result has
        the same bits on every machine.

        Raises:
            BadBlocksError: the bytes are not whole blocks, or not what an encoder can produce.
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
        """Apply an outer step as `ReplicatedState.apply` does. With `keeps_work`, training under way or finished still
        counts, relative to the theta that it began with. `counts` is True if the average includes this peer's work."""

    async def unchanged(self, index: int, fragment: int) -> None:
        """Record that outer step `index` leaves a fragment unchanged, since no peer has trained it. Workers that wait
        for the fragment continue."""


class BadBlocksError(Exception):
    """Error: bytes from a peer are not blocks of a payload."""


class SnapshotError(Exception):
    """Error: a snapshot of the state cannot be made or fetched, or its bytes are not the expected state."""
