"""What the peer process and each of its workers say to each other: one JSON object a line over a socket pair.

Commands are carried out one after the other; only `EndInnerLoop`, `Hold`, `TakeAverage` and those about moments are
heard while training. Each command is answered by exactly one reply of its kind, or by `Failed`; to `RunInnerLoop` the
first worker also sends `InnerStepDone` in between, and each sends `FragmentStored`. `AtStage` may come at any time.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from opendiloco.model.card import RunFacts
from opendiloco.model.export import Dtype
from opendiloco.workers.options import TEMPERATURE, WorkerOptions
from peers.values.leases import SampleRange

LINE_LIMIT = 16 * 2**20


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
