"""The control channel: what the peer process and each of its workers say to each other, one message a line over a
socket pair; and the peer process's handle on a worker. Knows no torch.

Commands are carried out one after the other; only `EndInnerLoop`, `Hold`, `TakeAverage` and those about moments are
heard while training. Each command is answered by exactly one reply of its kind, or by `Failed`; to `RunInnerLoop` the
first worker also sends `InnerStepDone` in between, and each sends `FragmentStored`. `AtStage` may come at any time.

A worker's death is noticed at once, since its end of the channel closes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from opendiloco.child_processes import child_environment, module_command
from opendiloco.config.data import MixturePhase
from opendiloco.config.overrides import NO_OVERRIDES, Overrides, mixture_phases
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import DataError, DeviceError, DeviceMemoryError, MachineError, WorkerError
from opendiloco.gpus import DEVICE_FAILURE, LOOK_AT_DEVICE
from opendiloco.model.export import Dtype, RunFacts
from opendiloco.stages import Watch
from opendiloco.workers.options import TEMPERATURE, WorkerOptions
from peers.errors import DilocoPeerError, ManifestError
from peers.network.signals import signals_held_back
from peers.values.leases import SampleRange
from peers.values.system import cancel_and_wait, start_task
from peers.values.workload import InnerLoop, SnapshotError

logger = logging.getLogger(__name__)

SETTING_UP = 7200.0
"""Seconds without a word of a training whose first inner step is not done: there data are read, and blocks compiled."""
LEAST_PATIENCE = 600.0
"""Seconds without a word after that, at least: a machine that is busy otherwise may be slow now and then."""
STEPS_OF_PATIENCE = 10  # of the slowest inner step so far
ALIVE_SECONDS = 30.0  # between two reports of a worker that waits for what others do
LINE_LIMIT = 16 * 2**20  # bytes of a reply: asyncio's 64 KiB are too few for long tracebacks or texts
CLOSE_SECONDS = 2.0  # in which a worker ends by itself, before it is killed
KILLED_SECONDS = 60.0  # in which the kernel takes a killed worker's memory back; a GPU's driver may hold it for good
LOOK_SECONDS = 0.2  # between two looks at whether the process has ended
LINES_KEPT = 60  # as many as a traceback through torch has
LINE_LENGTH = 500  # characters of a line that are kept: a worker may print anything
IN_A_SENTENCE = 3  # lines that an error repeats, the last ones; the log has all that were kept
TERMINAL_COMMANDS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""What torch's allocator for GPUs is set up with: its name, and two older ones."""


class ControlMessage(BaseModel):
    """One line of the control channel: the name of its class, and its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    def line(self) -> bytes:
        return f"{type(self).__name__} {self.model_dump_json()}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Return the message of this kind in a line. Raises: ValueError."""
        name, _, fields = line.decode().partition(" ")
        for kind in cls._kinds():
            if kind.__name__ == name:
                return kind.model_validate_json(fields)
        raise ValueError(f"{name[:LINE_LENGTH]!r} is no {cls.__name__}")

    @classmethod
    def _kinds(cls) -> Iterator[type[Self]]:
        yield cls
        for kind in cls.__subclasses__():
            yield from kind._kinds()


class Command(ControlMessage):
    """From the peer process to a worker."""


class Reply(ControlMessage):
    """From a worker to the peer process."""


class Report(Reply):
    """Comes while a command is carried out."""


class CountDevices(Command):
    """Say how many GPUs torch can use. Answered by `DevicesCounted`."""


class Configure(Command):
    """Build model, data and optimizer as worker `rank` of `workers`. Answered by `Configured` when all have.

    `memory` is the inherited descriptor of the `SharedVectors`. Workers meet at the first one's store, on this `port`;
    the first inherits its socket as `listener`. With `fresh`, the first puts the initial weights into shared memory;
    else they are left there.
    """

    manifest_content: dict[str, Any]
    options: WorkerOptions
    device: str
    rank: int
    workers: int
    memory: int
    port: int
    listener: int | None = None
    fresh: bool
    threads: int = 1


class RunInnerLoop(Command):
    """Run at most `steps` inner steps of outer step `index` on the samples of a lease. Answered by `InnerLoopDone`.

    `number` counts the trainings of these workers from 1; `tokens` are the run's before this outer step. Averages are
    merged `overlap` inner steps after their fragment was stored. Workers begin from theta, or from what lies in
    `local`, or else go on from where the training before has ended. `overrides` are in force in the outer step;
    samples are dealt to sources by these `mixtures` after the manifest's.
    """

    number: int
    index: int
    samples: tuple[SampleRange, ...]
    steps: int
    tokens: int
    overrides: Overrides = NO_OVERRIDES
    mixtures: tuple[MixturePhase, ...] = ()
    overlap: int = 0
    from_local: bool = False
    goes_on: bool = False

    @classmethod
    def of(cls, work: InnerLoop, config: RunConfig, **fields: Any) -> Self:
        """Return the command to train this work of a run. Raises: AmendmentError."""
        overrides = Overrides.of(work.amendment, config)
        return cls(
            index=work.index,
            samples=work.samples,
            steps=work.steps,
            tokens=work.tokens,
            overrides=overrides,
            mixtures=mixture_phases(work.amendments, config),
            **fields,
        )


class EndInnerLoop(Command):
    """End training `number` after its present inner step, or after its first. Has no reply.

    All workers end after the same inner step, as soon as one of them has heard it.
    """

    number: int


class Hold(Command):
    """Make no inner step until told that it is not `held` any more. Has no reply.

    Each worker waits between two inner steps; those that share a model wait for each other.
    """

    held: bool


class TakeAverage(Command):
    """Go on with a fragment that training `number` has stored: its new values lie in `local`, or else it is as it was.

    Has no reply. May come at any time until the fragment is stored again.
    """

    number: int
    fragment: int
    is_changed: bool


class Evaluate(Command):
    """Held-out loss of theta over at most `windows` windows. Answered by `Evaluated`."""

    windows: int


class Generate(Command):
    """Continue `prompt` by at most `tokens` tokens with theta, sampled at this temperature. Answered by `Generated`."""

    prompt: str
    tokens: int
    seed: int
    temperature: float = TEMPERATURE


class Export(Command):
    """Write theta as a transformers model folder, its weights as `dtype`. Answered by `Exported`."""

    folder: str
    facts: RunFacts
    dtype: Dtype = "float32"


class AtStage(Reply):
    """What the worker is busy with (see `opendiloco.stages`). `share` of it is done; None if that is not known."""

    stage: str
    share: float | None


class MoveMoments(Command):
    """Have the inner optimizer's state of a run in a file (see training/moments_file.py), or from there. A worker that
    is alone does it between two inner steps, and all write a copy while they train. Answered by `MomentsMoved`."""

    path: str
    run: str


class KeepMoments(MoveMoments):
    """Write it: each worker its part. The file is there when all have answered. `index` outer steps are taken."""

    index: int


class RecallMoments(MoveMoments):
    """Go on with it."""


class DevicesCounted(Reply):
    """How many GPUs torch can use. `hidden` says what keeps it from those that are there, and `remedy` what helps."""

    gpus: int
    hidden: str = ""
    remedy: str = ""


class Configured(Reply):
    """The worker is ready. `parameters` is the length of theta: all trainable values, and what pads fragments.

    `device_name` is the GPU's as torch has it, or "cpu"; `flops_per_token` see model/utilisation.py; `micro_batch`
    windows go through the model at once, uncompiled at most `uncompiled_micro_batch`. `held_out_digest` is that of the
    windows that evaluation reads, and `bytes_per_token` how much text a token of theirs stands for. `fragments` says
    where each lies in theta: its first value, and where it ends. `is_compiled`: its blocks are, for training;
    `uncompiled` says why not, if they should be.
    """

    parameters: int
    device: str
    device_name: str
    flops_per_token: float | None
    micro_batch: int
    uncompiled_micro_batch: int
    held_out_digest: str
    bytes_per_token: float
    fragments: tuple[tuple[int, int], ...]
    is_compiled: bool = False
    uncompiled: str = ""


class Alive(Report):
    """Comes now and then while a worker waits for what others do, and after an inner step that changed nothing."""


class InnerStepDone(Report):
    """After an inner step. `loss` in nats per token; `gradient_norm` before clipping; `learning_rate` of its first
    group of parameters; `tokens_per_second` over this training so far. The slowest inner step of this training so
    far took `slowest_seconds`."""

    inner_step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    slowest_seconds: float = 0.0


class FragmentStored(Report):
    """In the midst of training, or at its end: this worker's part of a fragment's weights is in `local`.

    `samples` (the lease, or a prefix of it) are those that will have been trained in the end, `tokens` the tokens in
    them; of a training that is stopped, those that have been. `loss` is the mean so far.
    """

    fragment: int
    samples: tuple[SampleRange, ...]
    tokens: int
    loss: float


class InnerLoopDone(Reply):
    """All inner steps are taken. Before, each fragment was stored.

    Of the inner steps, `skipped` changed nothing: their loss or gradient was not finite. `loss` and `gradient_norm` are
    means over the others; `learning_rate` is that of the last one. `waited_seconds` of its `seconds` the worker waited
    for data. `peak_memory_bytes`: on a GPU, what tensors took at most in this training; on the CPU, the process since
    it started. For `late_averages` of a fragment this worker had to wait, `average_wait_seconds` in all. Averages
    were there `longest_average_seconds` after their fragment was stored, at most; they are merged after `overlap` inner
    steps.
    """

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


class Evaluated(Reply):
    """Mean loss in nats per token over `tokens` predicted tokens."""

    loss: float
    tokens: int


class Generated(Reply):
    """The continuation, without the prompt."""

    text: str


class Exported(Reply):
    """The folder is complete."""


class MomentsMoved(Reply):
    """The moments are there, or `problem` says why not. Training goes on in any case."""

    problem: str | None = None


class Failed(Reply):
    """A command failed. `error` is a class of `opendiloco.errors` if the error is expected, else anything."""

    error: str
    message: str
    remedy: str
    traceback: str


def patience(slowest_seconds: float | None) -> float:
    """Return for how many seconds a worker may be silent in a training, and its collectives may take, when its slowest
    inner step so far took so many; None: it has done none yet."""
    return SETTING_UP if slowest_seconds is None else max(LEAST_PATIENCE, STEPS_OF_PATIENCE * slowest_seconds)


# Failures ------------------------------------------------------------------------------------------------------------
EXPECTED_ERRORS: dict[str, type[DilocoPeerError]] = {
    error.__name__: error
    for error in (DataError, DeviceError, DeviceMemoryError, MachineError, ManifestError, WorkerError)
}


class UnexpectedWorkerError(WorkerError):
    """The worker failed in a way that none of ours describes."""


def _rebuild(failure: Failed) -> DilocoPeerError:
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


# A worker process ----------------------------------------------------------------------------------------------------
Answer = TypeVar("Answer", bound=ControlMessage)


class _LastWords:
    """The last lines that a worker has printed, fit for a terminal: without colours, progress bars as they ended."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    def heard(self, line: str) -> None:
        """Take a line."""
        plain = TERMINAL_COMMANDS.sub("", line).rstrip().rpartition("\r")[2].replace("\t", "    ")[:LINE_LENGTH]
        shown = "".join(character if character.isprintable() else " " for character in plain)
        if shown.strip():
            self._lines.append(shown)
            logger.debug("the worker says: %s", shown)

    def sentence(self) -> str:
        """Return the last lines as the end of an error's message; nothing if there are none."""
        lines = [line.strip() for line in self._lines][-IN_A_SENTENCE:]
        return f" Its last words: {' | '.join(lines)}" if lines else ""

    def device_failure(self) -> str:
        """Return the last line that says that a device has failed; nothing if none does. NCCL ends the process so."""
        said = (line.strip() for line in reversed(self._lines) if DEVICE_FAILURE.search(line))
        return next(said, "")

    def log(self, name: str) -> None:
        """Log all that was kept."""
        if self._lines:
            logger.error("%s printed last:\n%s", name, "\n".join(f"    {line}" for line in self._lines))


class WorkerDeathError(WorkerError):
    """The worker's process has ended."""


class WorkerProcess:
    """A running worker. It takes one request at a time, and moves of moments beside it. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, on_stage: Watch) -> None:
        self.name = "the worker"
        self._on_stage = on_stage
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._moments_replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self.death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        """What to raise once the worker is dead."""
        self._process = process
        self._writer: asyncio.StreamWriter
        self._output = _LastWords()
        self._is_ended = False
        """Whether its end is our doing."""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, inherited: Sequence[int], threads: int, on_stage: Watch = lambda stage, share: None) -> Self:
        """Start a worker that inherits these descriptors. `on_stage` hears what it is busy with."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker = cls(await _spawn(theirs.fileno(), inherited, threads), on_stage)
        try:
            reader, worker._writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        except BaseException:
            worker.kill()
            raise
        output = start_task(worker._read_output())
        worker._tasks = [output, start_task(worker._read_replies(reader, output))]
        return worker

    def write(self, message: ControlMessage) -> None:
        """Send a message. To a dead worker it is lost without an error: the caller hears of the death."""
        if not self._writer.is_closing():
            self._writer.write(message.line())

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_report: Callable[[Report], None]
    ) -> Answer:
        """Send a command and wait for its answer. Must not be cancelled, or the next command gets this one's answer.

        Raises: the worker's error as one of ours; WorkerError when it dies.
        """
        self.write(command)
        while True:
            reply = await self._next(self._replies)
            if isinstance(reply, Report):
                on_report(reply)
            elif isinstance(reply, Failed):
                raise _rebuild(reply)
            elif isinstance(reply, answer):
                return reply
            else:
                raise WorkerError(f"the worker answered {command} with {reply}.", "This is a bug; report it.")

    async def move_moments(self, command: MoveMoments) -> None:
        """Have the worker move moments. Also while it answers another command. One at a time.

        Raises: SnapshotError when they cannot be moved; WorkerError when it dies.
        """
        self.write(command)
        reply = await self._next(self._moments_replies)
        assert isinstance(reply, MomentsMoved)
        if reply.problem is not None:
            raise SnapshotError(reply.problem)

    def kill(self) -> None:
        """End the worker at once, without waiting for its end; who waits for its replies hears that it is dead."""
        self._is_ended = True
        self._kill()
        self._end(WorkerDeathError(f"{self.name} was ended."))

    @property
    def is_running(self) -> bool:
        """Return whether its process is there."""
        return self._process.returncode is None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the worker: by closing its channel, else with SIGKILL. Leaves no process behind, unless it `is_running`
        even then: the kernel ends none that waits for a GPU's driver."""
        self._is_ended = True
        self._writer.close()
        try:
            await asyncio.wait_for(self._ended(), CLOSE_SECONDS)
        except TimeoutError:
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended(), KILLED_SECONDS)
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        await cancel_and_wait(*self._tasks)
        self._end(self._describe_death())

    def _hear(self, line: bytes) -> None:
        """Take a line of the worker's. Raises: ValueError when it is none of the protocol's."""
        reply = Reply.parse(line)
        if isinstance(reply, AtStage):
            self._on_stage(reply.stage, reply.share)
        elif isinstance(reply, MomentsMoved):
            self._moments_replies.put_nowait(reply)
        else:
            self._replies.put_nowait(reply)

    def _end(self, death: DilocoPeerError) -> None:
        """Take in that the worker is dead, and why: pass that on to all that wait for it."""
        if not self.death.done():
            self.death.set_result(death)
            self._replies.put_nowait(None)
            self._moments_replies.put_nowait(None)

    async def _next(self, replies: asyncio.Queue[Reply | None]) -> Reply:
        """Return the next reply. Raises: what says how the worker has died."""
        reply = await replies.get()
        if reply is None:
            replies.put_nowait(None)  # for the next one that waits
            raise self.death.result()
        return reply

    async def _ended(self) -> None:
        """Return once the process has ended. Some versions of asyncio also wait for other processes that hold its
        output, such as a compiler that it called and that hangs."""
        while self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), LOOK_SECONDS)

    async def _read_replies(self, reader: asyncio.StreamReader, output: asyncio.Task[None]) -> None:
        try:
            while line := await reader.readline():
                self._hear(line)
        except ConnectionError:  # it has ended before it read all that we said
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended(), CLOSE_SECONDS)
            self._kill()
        except ValueError as error:
            self._output.heard(f"control channel: {error}")
            self._kill()
        await self._ended()
        await asyncio.wait([output], timeout=CLOSE_SECONDS)
        self._end(self._describe_death())

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        while not self._process.stdout.at_eof():
            with contextlib.suppress(ValueError):  # a line beyond the reader's limit; asyncio has dropped it
                line = await self._process.stdout.readline()
                self._output.heard(line.decode(errors="replace"))

    def _describe_death(self) -> WorkerDeathError:
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        if not self._is_ended:
            self._output.log(self.name)
        if failure := self._output.device_failure():
            return WorkerDeathError(f"{self.name} {how}, since its device failed: {failure}", LOOK_AT_DEVICE)
        remedy = "If the machine ran out of memory, use a smaller batch or another machine; then join again."
        return WorkerDeathError(f"{self.name} {how}.{self._output.sentence()}", remedy)


async def _spawn(control: int, inherited: Sequence[int], threads: int) -> asyncio.subprocess.Process:
    """Start a worker that prints to a pipe of ours."""
    with signals_held_back():  # it would be gone before a polite leave could finish the round under way
        return await asyncio.create_subprocess_exec(
            *module_command("opendiloco.workers.worker", str(control)),
            pass_fds=(control, *inherited),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(OMP_NUM_THREADS=str(threads), **LOOPBACK_ONLY, **_allocator()),
        )


def _allocator() -> dict[str, str]:
    """Return what has torch's allocator for GPUs grow its segments, so that tensors of many sizes leave no gaps.
    Nothing if the volunteer has set the allocator up. Workers on a CPU pass it over."""
    return {} if any(name in os.environ for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}
