"""The memory that a peer of a run takes, main memory and its devices': the one formula. docs/training.md has it as a
table.

It counts what grows with the model, in the peer process and in what it shares with its workers. Not counted is what
lies in files on a disk, of which the system keeps in memory only what it has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendiloco.config.run_config import CodecSection
from opendiloco.kernels import FORMATS, Format
from opendiloco.quantities import VALUE_BYTES, OptimizerState
from peers.transfer.storage import IN_MEMORY
from peers.values.chunks import KEPT_BYTES

STATE_BYTES = 2 * VALUE_BYTES
"""Of theta and momentum, for each value."""
MOMENTS_BYTES = 2 * VALUE_BYTES
"""Of AdamW's two moments, for each value."""
QUANTIZED_BLOCK = 256
"""Values of a moment that have one scale in 8 bits."""
QUANTIZED_BYTES = 2 * (1 + VALUE_BYTES / QUANTIZED_BLOCK)
"""Of the two moments in 8 bits a value."""
QUANTIZED_AT_ONCE, QUANTIZING_BYTES = 1 << 21, 41
"""Values of a moment that are quantized together, and what each takes meanwhile, which a test measures."""
GAPS_BYTES = 25
"""Of gaps in glibc's heaps that gathering leaves, for each weight and each CPU worker but the first: measured with
2 and 3 workers and 62 million parameters (docs/benchmarks.md)."""
IN_USE = 1 << 26
"""Bytes of chunks and streams of a round, and of what the allocator keeps: measured, whatever the model."""
LOGIT_BYTES = 12
"""Of a logit while its gradient is computed: its softmax, and the gradients by this and by itself. A test measures
it."""
CONTEXT_BYTES = 1 << 29
"""Of each GPU, for CUDA's context, its kernels, and libraries' workspaces: a guess, nobody has measured it here."""
NCCL_BYTES = 1 << 30
"""Of each of several GPUs, for NCCL's buffers: a guess, too, for eight of them."""
FETCHED_AT_ONCE = 1 << 27
"""Bytes that are on their way from donors: four ranges of 8 MiB from each of four."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes for a model of which `values` are trained. Properties without a role are a volunteer's.

    Large snapshots, downloads and recorded payloads lie in its folder on a disk, which `join` always has.
    """

    values: int
    format: Format
    has_error_feedback: bool = False

    @classmethod
    def of(cls, values: int, codec: CodecSection) -> HostMemory:
        """Return that of a run with this codec."""
        return cls(values, FORMATS[codec.kind], has_error_feedback=codec.error_feedback > 0)

    @property
    def shared(self) -> int:
        """Theta and local, which workers share."""
        return 2 * VALUE_BYTES * self.values

    @property
    def vectors(self) -> int:
        """These, and momentum; with error feedback also what payloads have left out."""
        return self.shared + (1 + self.has_error_feedback) * VALUE_BYTES * self.values

    @property
    def payload(self) -> int:
        return self.format.payload_size(self.values)

    @property
    def kept(self) -> int:
        """Payloads of past entries, for peers that fell behind."""
        return KEPT_BYTES // max(1, self.payload) * self.payload

    @property
    def snapshot(self) -> int:
        """Return the frozen state, as long as joiners may fetch it; a second one while they still fetch the first."""
        size = STATE_BYTES * self.values
        return 0 if size > IN_MEMORY else size

    @property
    def growing(self) -> int:
        """The vectors, and three payloads: the pseudo-gradient, the next average, and the last average until the log
        has it on the disk, or what others send of this peer's part until it is averaged."""
        return self.vectors + 3 * self.payload

    @property
    def training(self) -> int:
        """In training and in rounds: these, and what does not grow with the model."""
        return self.growing + self.kept + IN_USE

    @property
    def late(self) -> int:
        """While others average without it: also a copy of the theta that it began with, and ranges of their payload."""
        return self.training + VALUE_BYTES * self.values + min(self.payload, FETCHED_AT_ONCE)

    @property
    def most(self) -> int:
        """In any of these phases, while a snapshot is served."""
        return self.late + self.snapshot

    @property
    def joining(self) -> int:
        """Of a joiner that fetches the state: the vectors, and a small state itself."""
        return self.vectors + self.snapshot + self._on_their_way

    @property
    def beginning_to_follow(self) -> int:
        """Of a follower: the state, and the snapshot that it fetches."""
        return 2 * STATE_BYTES * self.values + self._on_their_way

    @property
    def following(self) -> int:
        """Of a follower, from then on: the state, and a payload."""
        return STATE_BYTES * self.values + self.payload + min(self.payload, FETCHED_AT_ONCE)

    @property
    def evaluating(self) -> int:
        """Of `export`, and whoever else follows with a worker: the vectors, and the snapshot that is fetched."""
        return self.vectors + STATE_BYTES * self.values + self._on_their_way

    @property
    def archive(self) -> int:
        """Of an archive: a payload on its way to the disk, and kept ones."""
        return self.payload + min(self.payload, FETCHED_AT_ONCE)

    @property
    def _on_their_way(self) -> int:
        return min(STATE_BYTES * self.values, FETCHED_AT_ONCE)


def moments_bytes(values: int, kept: OptimizerState, is_on_host: bool = False) -> int:
    """Return the bytes of AdamW's moments of so many values between two steps, on a device; or those in main memory,
    which are none unless they are kept there."""
    if kept == "8bit":
        return 0 if is_on_host else int(QUANTIZED_BYTES * values)
    return MOMENTS_BYTES * values * ((kept == "host") == is_on_host)


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that all workers of a machine take together on their devices, or on the CPU in main memory.

    The model has `weights` values, of which `trained` are trained. Activations come on top.

    `largest` values are in the largest parameter, `gathered` in what FSDP2 has whole at a time on all workers, if they
    share the model, and `whole_gradients` in the gradients that they keep whole, if they do. At least `logits` are
    computed at once on all workers together.
    """

    weights: int
    trained: int
    largest: int = 0
    gathered: int = 0
    whole_gradients: int = 0
    head: int = 0
    """Values of the head's matrix, whose gradient adds up over pieces beside that of earlier micro-batches. Where
    workers share the model, it is among what they gather."""
    embedding: int = 0
    """Values of an embedding, whose gradient is computed last, beside that of earlier micro-batches; none if shared."""
    tied: int = 0
    """Values of an embedding that is the head's matrix, too: its gradients by either are there at once, and their sum.
    By then logits are gone."""
    logits: int = 0
    is_fused: bool = False
    """Whether AdamW's step takes no memory for itself."""
    optimizer_state: OptimizerState = "device"
    copied: int = 0
    """Weights that autocast keeps in bf16 for an inner step. Their gradients in bf16 are all there in the end, too:
    autograd goes back to what was cast for an earlier micro-batch when all else is done."""
    gathering_on_cpu: int = 0
    """How many workers gather groups in main memory, and leave gaps there."""

    @property
    def kept(self) -> int:
        """Weights, their gradients, and AdamW's two moments, unless these are in main memory."""
        return self.evaluating + VALUE_BYTES * self.trained + moments_bytes(self.trained, self.optimizer_state)

    @property
    def on_host(self) -> int:
        """Return the moments that a worker keeps in main memory, whatever its device."""
        return moments_bytes(self.trained, self.optimizer_state, is_on_host=True)

    @property
    def stepping(self) -> int:
        """Return what AdamW's step takes for itself: where moments are kept otherwise, those of one parameter, too."""
        step = 0 if self.is_fused else 2 * VALUE_BYTES * self.largest
        whole = 0 if self.optimizer_state == "device" else MOMENTS_BYTES * self.largest
        quantized = min(self.largest, QUANTIZED_AT_ONCE) if self.optimizer_state == "8bit" else 0
        return whole + max(step, QUANTIZING_BYTES * quantized)

    @property
    def evaluating(self) -> int:
        """Return the weights alone."""
        return VALUE_BYTES * self.weights

    @property
    def training(self) -> int:
        """At the most: what is kept, with what the forward and backward pass need once more, or what a step does."""
        whole = self.gathered + max(self.gathered, self.whole_gradients)
        head = self.head * (VALUE_BYTES + 2 * (self.copied > 0))  # in bf16, also the matrix itself or its gradient
        passes = 2 * self.copied + VALUE_BYTES * whole + head + LOGIT_BYTES * self.logits
        passes = max(passes, 4 * self.copied + VALUE_BYTES * (self.embedding + 3 * self.tied))
        gaps = GAPS_BYTES * self.weights * max(0, self.gathering_on_cpu - 1)
        return self.kept + gaps + max(passes, self.stepping)
