"""What the peer process and each of its workers say to each other, one JSON object a line over a socket pair; and the
worker's end of that channel.

Commands are carried out one after the other; only `EndInnerLoop`, `Hold`, `TakeAverage` and those about moments are
heard while training. Each command is answered by exactly one reply of its kind, or by `Failed`; to `RunInnerLoop` the
first worker also sends `InnerStepDone` in between, and each sends `FragmentStored`. `AtStage` may come at any time.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from opendiloco.errors import DataError, DeviceMemoryError, MachineError, WorkerError
from opendiloco.model.export import Dtype, RunFacts
from opendiloco.workers.options import TEMPERATURE, WorkerOptions
from peers.errors import DilocoPeerError, ManifestError
from peers.values.leases import SampleRange

logger = logging.getLogger(__name__)

LINE_LIMIT = 16 * 2**20
LOOK_SECONDS = 0.1
"""Between two looks of a worker, in a pause, at what the peer process wants."""


class ControlMessage(BaseModel):
    """One line of the control channel."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class CountDevices(ControlMessage):
    """Say how many GPUs torch sees. Answered by `DevicesCounted`."""

    kind: Literal["count_devices"] = "count_devices"


class Configure(ControlMessage):
    """Build model, data and optimizer as worker `rank` of `workers`, with so many CPU `threads`.

    Answered by `Configured` when all have.

    They meet at the first worker's store, on this `port`. With `fresh`, the first puts the initial weights into shared
    memory; else they are left there.
    """

    kind: Literal["configure"] = "configure"
    manifest_content: dict[str, Any]
    options: WorkerOptions
    device: str
    rank: int
    workers: int
    port: int
    fresh: bool
    threads: int = 1


class RunInnerLoop(ControlMessage):
    """Run at most `steps` inner steps of outer step `index` on the samples of a lease. Answered by `InnerLoopDone`.

    `number` counts the trainings of these workers from 1; `tokens` are the run's before this outer step. Averages are
    merged `overlap` inner steps after their fragment was stored. Workers begin from theta, or from what lies in
    `local`, or else go on from where the training before has ended.
    """

    kind: Literal["run_inner_loop"] = "run_inner_loop"
    number: int
    index: int
    samples: tuple[SampleRange, ...]
    steps: int
    tokens: int
    overlap: int = 0
    from_local: bool = False
    goes_on: bool = False


class EndInnerLoop(ControlMessage):
    """End training `number` after its present inner step, or after its first if it has not begun. Has no reply.

    All workers end after the same inner step, as soon as one of them has heard it.
    """

    kind: Literal["end_inner_loop"] = "end_inner_loop"
    number: int


class Hold(ControlMessage):
    """Make no inner step until told that it is not `held` any more. Has no reply.

    Each worker waits between two inner steps; those that share a model wait for each other.
    """

    kind: Literal["hold"] = "hold"
    held: bool


class TakeAverage(ControlMessage):
    """Go on with a fragment that training `number` has stored: its new values lie in `local`, or else it is as it was.

    Has no reply. May come at any time until the fragment is stored again.
    """

    kind: Literal["take_average"] = "take_average"
    number: int
    fragment: int
    is_changed: bool


class Evaluate(ControlMessage):
    """Held-out loss of theta over at most `windows` windows. Answered by `Evaluated`."""

    kind: Literal["evaluate"] = "evaluate"
    windows: int


class Generate(ControlMessage):
    """Continue `prompt` by at most `tokens` tokens with theta, sampled at this temperature. Answered by `Generated`."""

    kind: Literal["generate"] = "generate"
    prompt: str
    tokens: int
    seed: int
    temperature: float = TEMPERATURE


class Export(ControlMessage):
    """Write theta as a transformers model folder, its weights as `dtype`. Answered by `Exported`."""

    kind: Literal["export"] = "export"
    folder: str
    facts: RunFacts
    dtype: Dtype = "float32"


class AtStage(ControlMessage):
    """What the worker is busy with (see `opendiloco.stages`). `share` of it is done; None if that is not known."""

    kind: Literal["at_stage"] = "at_stage"
    stage: str
    share: float | None


class KeepMoments(ControlMessage):
    """Write the inner optimizer's state into a file (see inner/moments_file.py): each worker its part, and the file is
    there when all have answered. `index` outer steps are taken. A worker that is alone does it between two inner steps.
    Answered by `MomentsMoved`."""

    kind: Literal["keep_moments"] = "keep_moments"
    path: str
    run: str
    index: int


class RecallMoments(ControlMessage):
    """Go on with the inner optimizer's state in such a file. Answered by `MomentsMoved`."""

    kind: Literal["recall_moments"] = "recall_moments"
    path: str
    run: str


class ForgetMoments(ControlMessage):
    """Begin anew, as if the inner optimizer had never made a step. Answered by `MomentsMoved`."""

    kind: Literal["forget_moments"] = "forget_moments"


class DevicesCounted(ControlMessage):
    """How many GPUs torch sees."""

    kind: Literal["devices_counted"] = "devices_counted"
    gpus: int


class Configured(ControlMessage):
    """The worker is ready. `parameters` is the length of theta: all trainable values, and what pads fragments.

    `device_name` is the GPU's as torch has it, or "cpu"; `flops_per_token` see model/utilisation.py; `micro_batch`
    windows go through the model at once. `held_out_digest` is that of the windows that evaluation reads, and
    `bytes_per_token` how much text a token of theirs stands for. `fragments` says where each lies in theta: its first
    value, and where it ends.
    """

    kind: Literal["configured"] = "configured"
    parameters: int
    tokens_per_sample: int
    device: str
    device_name: str
    flops_per_token: float | None
    micro_batch: int
    held_out_digest: str
    bytes_per_token: float
    fragments: tuple[tuple[int, int], ...]


class InnerStepDone(ControlMessage):
    """After an inner step. `loss` in nats per token; `gradient_norm` before clipping; `learning_rate` of its first
    group of parameters; `tokens_per_second` over this training so far."""

    kind: Literal["inner_step_done"] = "inner_step_done"
    inner_step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float


class FragmentStored(ControlMessage):
    """In the midst of training, or at its end: this worker's part of a fragment's weights is in `local`.

    `samples` (the lease, or a prefix of it) are those that will have been trained in the end, `tokens` the tokens in
    them; of a training that is stopped, those that have been. `loss` is the mean so far.
    """

    kind: Literal["fragment_stored"] = "fragment_stored"
    fragment: int
    samples: tuple[SampleRange, ...]
    tokens: int
    loss: float


class InnerLoopDone(ControlMessage):
    """All inner steps are taken. Before, each fragment was stored.

    Of the inner steps, `skipped` changed nothing: their loss or gradient was not finite. `loss` and `gradient_norm` are
    means over the others; `learning_rate` is that of the last one. `waited_seconds` of its `seconds` the worker waited
    for data. `peak_memory_bytes`: on a GPU, what tensors took at most in this training; on the CPU, the process since
    it started. For `late_averages` of a fragment this worker had to wait, `average_wait_seconds` in all. Averages
    were there `longest_average_seconds` after their fragment was stored, at most; they are merged after `overlap` inner
    steps.
    """

    kind: Literal["inner_loop_done"] = "inner_loop_done"
    tokens: int
    inner_steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: int
    seconds: float
    waited_seconds: float
    peak_memory_bytes: int
    late_averages: int = 0
    average_wait_seconds: float = 0.0
    longest_average_seconds: float = 0.0
    overlap: int = 0


class Evaluated(ControlMessage):
    """Mean loss in nats per token over `tokens` predicted tokens."""

    kind: Literal["evaluated"] = "evaluated"
    loss: float
    tokens: int


class Generated(ControlMessage):
    """The continuation, without the prompt."""

    kind: Literal["generated"] = "generated"
    text: str


class Exported(ControlMessage):
    """The folder is complete."""

    kind: Literal["exported"] = "exported"


class MomentsMoved(ControlMessage):
    """The moments are there, or `problem` says why not. Training goes on in any case."""

    kind: Literal["moments_moved"] = "moments_moved"
    problem: str | None = None


class Failed(ControlMessage):
    """A command failed. `error` is a class of `opendiloco.errors` if the error is expected, else anything."""

    kind: Literal["failed"] = "failed"
    error: str
    message: str
    remedy: str
    traceback: str


MoveMoments = KeepMoments | RecallMoments | ForgetMoments
"""Between two inner steps, if the worker is alone."""
Command = (
    CountDevices
    | Configure
    | RunInnerLoop
    | EndInnerLoop
    | Hold
    | TakeAverage
    | Evaluate
    | Generate
    | Export
    | MoveMoments
)
Report = InnerStepDone | FragmentStored
"""Comes while a command is carried out."""
Reply = (
    AtStage
    | DevicesCounted
    | Configured
    | InnerStepDone
    | FragmentStored
    | InnerLoopDone
    | Evaluated
    | Generated
    | Exported
    | MomentsMoved
    | Failed
)

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_REPLIES: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def parse_command(line: bytes) -> Command:
    """Raises: pydantic.ValidationError."""
    return _COMMANDS.validate_json(line)


def parse_reply(line: bytes) -> Reply:
    """Raises: pydantic.ValidationError."""
    return _REPLIES.validate_json(line)


# Failures ------------------------------------------------------------------------------------------------------------
EXPECTED_ERRORS: dict[str, type[DilocoPeerError]] = {
    error.__name__: error for error in (DataError, DeviceMemoryError, MachineError, ManifestError, WorkerError)
}


class UnexpectedWorkerError(WorkerError):
    """The worker failed in a way that none of ours describes."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device has no memory left.

    Torch has a class for its own allocator alone; what CUDA's libraries and NCCL could not get, they say in words.
    """
    said = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "cublas_status_alloc_failed" in said)
    )


def is_short_of_shared_memory(error: Exception) -> bool:
    """Return whether NCCL found too little in /dev/shm, of which a container has 64 MB unless told otherwise."""
    said = str(error)
    return isinstance(error, RuntimeError) and "/dev/shm" in said and ("segment" in said or "No space left" in said)


def describe_failure(error: Exception) -> Failed:
    """Return what the peer process needs to raise the same error on its side."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ImportError):
        error = MachineError(f"a library of the training stack cannot be imported: {error}.", "Install it with pip.")
    if is_short_of_shared_memory(error):
        remedy = "In a container, give it more: docker run --shm-size 1g, or --ipc host. Else train on one GPU."
        error = MachineError("/dev/shm has too little room for what this machine's GPUs tell each other.", remedy)
    if is_out_of_memory(error):
        remedy = "Use --micro-batch with a smaller number, --activation-checkpointing, or another device."
        error = DeviceMemoryError("the device ran out of memory.", remedy)
    message, remedy = (error.message, error.remedy) if isinstance(error, DilocoPeerError) else (str(error), "")
    return Failed(error=type(error).__name__, message=message, remedy=remedy, traceback=trace)


def rebuild(failure: Failed) -> DilocoPeerError:
    """Return the worker's error as one of ours, with its traceback as a note; unexpected ones as a WorkerError."""
    expected = EXPECTED_ERRORS.get(failure.error)
    error: DilocoPeerError
    if expected is not None:
        error = expected(failure.message, failure.remedy)
    else:
        logger.error("in the worker:\n%s", failure.traceback.rstrip())
        said = f"the worker failed: {failure.error}: {failure.message}."
        error = UnexpectedWorkerError(said, "This may be a bug; report it.")
    error.add_note(f"In the worker:\n{failure.traceback}")
    return error


# The worker's end ----------------------------------------------------------------------------------------------------
class Average(NamedTuple):
    """What was said last of a fragment: of which training it is, whether there are new values, and when it was heard,
    by the clock that never goes back."""

    number: int
    is_changed: bool
    heard_at: float


class ControlChannel:
    """The worker's end of the control channel, read by a thread of its own so that its closing is noticed at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.stopped_number = 0
        self._may_step = threading.Event()  # set unless the owner wants a pause
        self._may_step.set()
        self._averages: dict[int, Average] = {}
        self._news = threading.Event()
        self.commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def is_held(self, number: int) -> bool:
        """Wait for a moment for a pause to end; return whether the next step of training `number` still has to wait."""
        return number > self.stopped_number and not self._may_step.wait(LOOK_SECONDS)

    def send(self, message: ControlMessage) -> None:
        with self._sending:  # batches are read by a thread of their own, which may have to tokenize
            self._connection.sendall(message.line())

    def average_of(self, fragment: int) -> Average | None:
        """Return what was said last of a fragment."""
        return self._averages.get(fragment)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once this holds; it is asked anew whenever something was heard."""
        while True:
            self._news.clear()
            if is_so():
                return
            self._news.wait()

    def take(self, command: Command) -> None:
        """Hear a command; those that are not heard while training wait in `commands`."""
        match command:
            case EndInnerLoop():
                self.stopped_number = command.number
            case Hold():
                (self._may_step.clear if command.held else self._may_step.set)()
            case TakeAverage():
                self._averages[command.fragment] = Average(command.number, command.is_changed, time.monotonic())
            case _:
                self.commands.put(command)
        self._news.set()

    def _read(self) -> None:
        """Lines to commands, until the peer process is gone. Training cannot be interrupted politely, so: _exit."""
        try:
            for line in self._connection.makefile("rb"):
                self.take(parse_command(line))
        except ConnectionError:
            pass
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
