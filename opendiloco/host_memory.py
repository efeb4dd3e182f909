"""The bytes of main memory and device memory that a peer of a run needs. docs/training.md has the formula as a table.

The formula counts memory that grows with the model, in the peer process and shared with its workers. It does not count
files on a disk, which the system keeps in memory only if there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendiloco.config.run_config import CodecSection
from opendiloco.kernels import FORMATS, Format
from opendiloco.quantities import VALUE_BYTES, OptimizerState
from peers.transfer.storage import IN_MEMORY
from peers.values.chunks import KEPT_BYTES

STATE_BYTES = 2 * VALUE_BYTES
"""Bytes of theta and momentum for each trained value."""
MOMENTS_BYTES = 2 * VALUE_BYTES
"""Bytes of AdamW's two moments for each value."""
QUANTIZED_BLOCK = 256
"""Number of values of a moment that share one scale in 8 bits."""
QUANTIZED_BYTES = 2 * (1 + VALUE_BYTES / QUANTIZED_BLOCK)
"""Bytes of the two moments for each value in 8 bits."""
QUANTIZED_AT_ONCE, QUANTIZING_BYTES = 1 << 21, 41
"""Number of values of a moment that are quantized together, and the bytes that each needs meanwhile. A test measures
them."""
GAPS_BYTES = 25
"""Bytes of gaps that gathering leaves in glibc's heaps, for each weight and each CPU worker but the first. Measured
with 2 and 3 workers and 62 million parameters (docs/benchmarks.md)."""
IN_USE = 1 << 26
"""Bytes of a round's chunks and streams, and of memory that the allocator keeps. Measured; independent of the model."""
LOGIT_BYTES = 12
"""Bytes of a logit while its gradient is computed: its softmax, and the two gradients. A test measures them."""
CONTEXT_BYTES = 1 << 29
"""Estimated bytes on each GPU for CUDA's context, its kernels, and libraries' workspaces. Not measured."""
NCCL_BYTES = 1 << 30
"""Estimated bytes on each of several GPUs, up to eight, for NCCL's buffers. Not measured."""
FETCHED_AT_ONCE = 1 << 27
"""Bytes that donors send at the same time: four ranges of 8 MiB from each of four donors."""


@dataclass(frozen=True)
class HostMemory:
    """The bytes of main memory that a peer needs for a model with `values` trained values. The peer is a volunteer,
    unless a property names another role.

    Large snapshots, downloads and recorded payloads lie in the run's folder on a disk, so they are not counted.
    """

    values: int
    format: Format
    has_error_feedback: bool = False

    @classmethod
    def of(cls, values: int, codec: CodecSection) -> HostMemory:
        """Return the main memory needed for `values` trained values in a run with this codec."""
        return cls(values, FORMATS[codec.kind], has_error_feedback=codec.error_feedback > 0)

    @property
    def shared(self) -> int:
        """The bytes of theta and of the workers' weights (local), which all workers on the machine share."""
        return 2 * VALUE_BYTES * self.values

    @property
    def vectors(self) -> int:
        """The bytes of theta, the workers' weights, the momentum, and with error feedback the kept errors."""
        return self.shared + (1 + self.has_error_feedback) * VALUE_BYTES * self.values

    @property
    def payload(self) -> int:
        return self.format.payload_size(self.values)

    @property
    def kept(self) -> int:
        """The bytes of earlier payloads that a volunteer keeps in memory for peers that fell behind."""
        return KEPT_BYTES // max(1, self.payload) * self.payload

    @property
    def snapshot(self) -> int:
        """The bytes of the frozen state for joiners, or 0 if the state is so large that it is stored in a file."""
        size = STATE_BYTES * self.values
        return 0 if size > IN_MEMORY else size

    @property
    def growing(self) -> int:
        """The bytes that grow with the model: `vectors`, and three payloads: pseudo-gradient, average, and either the
        last average until it is on the disk, or other members' blocks until this peer has averaged them."""
        return self.vectors + 3 * self.payload

    @property
    def training(self) -> int:
        """The bytes needed in training and rounds: `growing`, `kept`, and a constant."""
        return self.growing + self.kept + IN_USE

    @property
    def late(self) -> int:
        """The bytes needed while other peers average without this peer: `training`, a copy of its base theta, and the
        bytes of a payload that donors are sending."""
        return self.training + VALUE_BYTES * self.values + min(self.payload, FETCHED_AT_ONCE)

    @property
    def most(self) -> int:
        """The most bytes that a volunteer needs in training, rounds or catching up, together with its snapshot for
        joiners."""
        return self.late + self.snapshot

    @property
    def joining(self) -> int:
        """The bytes that a joiner needs while it fetches the state: `vectors`, `snapshot`, and bytes from donors."""
        return self.vectors + self.snapshot + self._on_their_way

    @property
    def beginning_to_follow(self) -> int:
        """The bytes of a starting follower, which applies the log without training: its state, and a fetched
        snapshot."""
        return 2 * STATE_BYTES * self.values + self._on_their_way

    @property
    def following(self) -> int:
        """The bytes of a follower after its start: the state, a payload, and the bytes of the next payload that donors
        are sending."""
        return STATE_BYTES * self.values + self.payload + min(self.payload, FETCHED_AT_ONCE)

    @property
    def evaluating(self) -> int:
        """The bytes of a follower that evaluates the model in a worker, as `export` does: `vectors`, the snapshot that
        it fetches, and the bytes that donors are sending."""
        return self.vectors + STATE_BYTES * self.values + self._on_their_way

    @property
    def archive(self) -> int:
        """The bytes of an archive: a payload that it writes to disk, and the bytes of the next payload that donors are
        sending."""
        return self.payload + min(self.payload, FETCHED_AT_ONCE)

    @property
    def _on_their_way(self) -> int:
        return min(STATE_BYTES * self.values, FETCHED_AT_ONCE)


def moments_bytes(values: int, kept: OptimizerState, is_on_host: bool = False) -> int:
    """Return the bytes that AdamW's moments of `values` weights need between two steps on the device, or, if
    `is_on_host`, in main memory."""
    if kept == "8bit":
        return 0 if is_on_host else int(QUANTIZED_BYTES * values)
    return MOMENTS_BYTES * values * ((kept == "host") == is_on_host)


@dataclass(frozen=True)
class WorkerMemory:
    """The bytes that all workers of a machine need together: on their devices or, for CPU workers, in main memory.

    The model has `weights` values, and `trained` of them are trained. Activations come on top. `largest` is the size of
    the largest parameter. If the workers share the model, `gathered` is the number of values that FSDP2 holds whole at
    a time on all workers together, and `whole_gradients` the number of gradient values that they keep whole. `logits`
    is the smallest number of logits that all workers compute at once.
    """

    weights: int
    trained: int
    largest: int = 0
    gathered: int = 0
    whole_gradients: int = 0
    head: int = 0
    """Values of the head's matrix. The gradients of its pieces are summed beside the gradient of earlier micro-batches.
    If workers share the model, `gathered` includes it."""
    embedding: int = 0
    """Values of an embedding; 0 if workers share the model. Its gradient is computed last, beside that of earlier
    micro-batches."""
    tied: int = 0
    """Values of an embedding that is also the head's matrix. Its two gradients and their sum exist at the same time.
    The logits have been freed by then."""
    logits: int = 0
    is_fused: bool = False
    """True if AdamW's step needs no memory for itself."""
    optimizer_state: OptimizerState = "device"
    copied: int = 0
    """Weights that autocast keeps in bf16 for an inner step. At the end all of their bf16 gradients exist, too, because
    autograd computes those of an earlier micro-batch's copies last."""
    gathering_on_cpu: int = 0
    """Number of workers that gather groups in main memory and leave gaps there."""

    @property
    def kept(self) -> int:
        """The bytes of the weights, their gradients, and AdamW's two moments if the device keeps these."""
        return self.evaluating + VALUE_BYTES * self.trained + moments_bytes(self.trained, self.optimizer_state)

    @property
    def on_host(self) -> int:
        """The bytes of AdamW's moments that are kept in main memory, for workers on any device."""
        return moments_bytes(self.trained, self.optimizer_state, is_on_host=True)

    @property
    def stepping(self) -> int:
        """The bytes that AdamW's step allocates temporarily. They include one parameter's moments, unless the device
        keeps all moments in fp32."""
        step = 0 if self.is_fused else 2 * VALUE_BYTES * self.largest
        whole = 0 if self.optimizer_state == "device" else MOMENTS_BYTES * self.largest
        quantized = min(self.largest, QUANTIZED_AT_ONCE) if self.optimizer_state == "8bit" else 0
        return whole + max(step, QUANTIZING_BYTES * quantized)

    @property
    def evaluating(self) -> int:
        """The bytes of the weights, which are all that an evaluation needs."""
        return VALUE_BYTES * self.weights

    @property
    def training(self) -> int:
        """The most bytes in training: `kept`, and the larger need of the forward and backward passes or AdamW's
        step."""
        whole = self.gathered + max(self.gathered, self.whole_gradients)
        # In bf16, each value of the head's matrix needs two more bytes, for a bf16 copy of it or of its gradient.
        head = self.head * (VALUE_BYTES + 2 * (self.copied > 0))
        passes = 2 * self.copied + VALUE_BYTES * whole + head + LOGIT_BYTES * self.logits
        passes = max(passes, 4 * self.copied + VALUE_BYTES * (self.embedding + 3 * self.tied))
        gaps = GAPS_BYTES * self.weights * max(0, self.gathering_on_cpu - 1)
        return self.kept + gaps + max(passes, self.stepping)
