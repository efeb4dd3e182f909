"""The control channel between the peer process and a worker; and `WorkerProcess`, which starts and commands a worker.

The channel is a socket pair that carries one message a line. This module imports no torch.

A worker carries out commands one after the other. While it trains, it takes only `EndInnerLoop`, `Hold`, `TakeAverage`
and the commands about moments. It answers each command with exactly one reply of that command's kind, or with `Failed`.
During `RunInnerLoop` the first worker also sends `InnerStepDone`, and each worker sends `FragmentStored`. A worker may
send `AtStage` at any time.

The peer process notices a worker's death at once, because the worker's end of the channel closes.
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
"""Seconds for which a training may be silent before its first inner step is done. In this time the worker reads data
and compiles blocks."""
LEAST_PATIENCE = 600.0
"""Least number of seconds for which a training may be silent after its first inner step, because other programs may
slow the machine down for a while."""
STEPS_OF_PATIENCE = 10  # a worker may be silent for 10 times the duration of its slowest inner step
ALIVE_SECONDS = 30.0  # seconds between two `Alive` reports of a worker that waits for other peers
LINE_LIMIT = 16 * 2**20  # largest size of a reply, in bytes; asyncio's 64 KiB are too few for long tracebacks and texts
CLOSE_SECONDS = 2.0  # seconds that a worker has to exit before the peer process kills it
KILLED_SECONDS = 60.0  # seconds to wait for the end of a killed worker, because a GPU's driver may block it for ever
LOOK_SECONDS = 0.2  # seconds between two checks for the end of a worker's process
LINES_KEPT = 60  # number of a worker's last printed lines to keep: enough for a traceback through torch
LINE_LENGTH = 500  # characters to keep of each printed line, because a worker may print lines of any length
IN_A_SENTENCE = 3  # number of a worker's last printed lines that an error message repeats; the log has all kept lines
TERMINAL_COMMANDS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure torch's GPU allocator: the current name, and two older ones."""


class ControlMessage(BaseModel):
    """A message on the control channel, sent as one line: the name of the message's class, and the fields as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    def line(self) -> bytes:
        return f"{type(self).__name__} {self.model_dump_json()}\n".encode()

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Return the message that a line of the control channel encodes. Raises: ValueError if the message is not of
        this class."""
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
    """A message from the peer process to a worker."""


class Reply(ControlMessage):
    """A message from a worker to the peer process."""


class Report(Reply):
    """A message that a worker sends before its answer, while it carries out a command."""


class CountDevices(Command):
    """Command to count the GPUs that torch can use. The worker answers with `DevicesCounted`."""


class Configure(Command):
    """Command to build model, data and optimizer, as worker `rank` of `workers` workers. Each worker answers with
    `Configured` once all workers have built theirs.

    `memory` is the inherited descriptor of the `SharedVectors`. The workers connect to each other through the first
    worker's store on `port`; the first worker inherits the socket of that store as `listener`. If `fresh`, the first
    worker writes the initial weights into shared memory; otherwise shared memory already holds the weights.
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
    """Command to run at most `steps` inner steps of outer step `index` on the samples of a lease. The worker answers
    with `InnerLoopDone`.

    `number` counts the trainings of these workers from 1. `tokens` is the number of tokens that the run had trained
    before this outer step. The workers merge an average `overlap` inner steps after they stored its fragment. They
    begin from the weights in `local` if `from_local`, from the end of the previous training if `goes_on`, and otherwise
    from theta. `overrides` apply in this outer step. `mixtures` are the mixture phases that amendments have added to
    the manifest's.
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
        """Return the command to train `work` in the run of `config`. Raises: AmendmentError if an amendment does not
        suit the run."""
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
    """Command to end the training `number` after the inner step in progress, but not before its first inner step is
    done. The worker sends no reply.

    All workers end after the same inner step, as soon as one of them has received this command.
    """

    number: int


class Hold(Command):
    """Command to pause training (if `held`) or to resume it. The worker sends no reply.

    Each worker pauses between two inner steps. Workers that share a model also wait for each other.
    """

    held: bool


class TakeAverage(Command):
    """Command to merge a fragment's average into the worker's weights. Training `number` has stored the fragment. If
    `is_changed`, the shared vector `local` holds the fragment's new values; otherwise there is nothing to merge.

    It has no reply. The peer process may send it at any time until the worker stores the fragment again.
    """

    number: int
    fragment: int
    is_changed: bool


class Evaluate(Command):
    """Command to compute the held-out loss of theta over at most `windows` windows of text. The worker answers with
    `Evaluated`."""

    windows: int


class Generate(Command):
    """Command to continue `prompt` by at most `tokens` tokens, sampled from theta at `temperature`. The worker answers
    with `Generated`."""

    prompt: str
    tokens: int
    seed: int
    temperature: float = TEMPERATURE


class Export(Command):
    """Command to write theta to `folder` as a transformers model with weights of type `dtype`. The worker answers with
    `Exported`."""

    folder: str
    facts: RunFacts
    dtype: Dtype = "float32"


class AtStage(Reply):
    """Message: the stage that the worker has reached, such as "building the model". `share` is the finished share of
    the stage, 0 to 1, or None if unknown."""

    stage: str
    share: float | None


class MoveMoments(Command):
    """The base of two commands about the inner optimizer's moments: `KeepMoments` writes them to the file `path`, and
    `RecallMoments` loads them from it. `run` is the id of the run that has trained them.

    The file's format is in training/moments_file.py. A single worker carries a command out between two inner steps;
    several workers carry it out between two trainings. When they write, they copy the state and go on; a thread writes
    the copy. The worker answers with `MomentsMoved`.
    """

    path: str
    run: str


class KeepMoments(MoveMoments):
    """Command to write the inner optimizer's moments to a file. Each worker writes its part; the file is complete when
    all workers have answered. `index` is the number of outer steps taken."""

    index: int


class RecallMoments(MoveMoments):
    """Command to load the inner optimizer's moments from a file, and to continue training with them."""


class DevicesCounted(Reply):
    """Reply: the number of GPUs that torch can use. If the machine has GPUs but torch can use none, `problem` is the
    reason and `remedy` the remedy."""

    gpus: int
    problem: str = ""
    remedy: str = ""


class Configured(Reply):
    """Reply: the worker has built its model, data and optimizer.

    `parameters` is the length of theta: all trainable values, and the padding between fragments. `device_name` is
    torch's name of the GPU, or "cpu". `flops_per_token` is explained in model/utilisation.py. `micro_batch` windows go
    through the model at once; uncompiled, at most `uncompiled_micro_batch` do. `held_out_digest` is the digest of the
    windows that evaluation reads, and `bytes_per_token` the mean number of bytes of text per token in them. `fragments`
    has the start and end of each fragment in theta. `is_compiled` is true if training runs compiled blocks;
    `uncompiled` is the reason why it does not, if it should.
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
    """Report that the worker still runs. A worker sends it every `ALIVE_SECONDS` while it waits for other peers, and
    after each skipped inner step."""


class InnerStepDone(Report):
    """Report: the measurements of one inner step. `loss` is in nats per token. `gradient_norm` is the norm before
    clipping. `learning_rate` is that of the first parameter group. `tokens_per_second` is the mean of this training so
    far. `slowest_seconds` is the duration of this training's slowest inner step so far."""

    inner_step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    slowest_seconds: float = 0.0


class FragmentStored(Report):
    """Report: the worker has written its part of a fragment's weights to the shared vector `local`.

    `samples` (the lease, or a prefix of it) are the samples that the whole training will have used, and `tokens` is the
    number of tokens in them. If the training is stopped, they count what it has used so far. `loss` is the mean loss so
    far.
    """

    fragment: int
    samples: tuple[SampleRange, ...]
    tokens: int
    loss: float


class InnerLoopDone(Reply):
    """Reply: the worker has stored all fragments and taken all inner steps of a training.

    `skipped` counts the inner steps that changed nothing, because their loss or gradient was not finite. `loss` and
    `gradient_norm` are means over the other steps. `learning_rate` is that of the last step. The worker waited for data
    for `waited_seconds` of its `seconds`. `peak_memory_bytes` is the peak of a GPU's tensors in this training; on the
    CPU it is the peak of the process since its start.

    The worker had to wait for the averages of `late_averages` fragments, for `average_wait_seconds` in all.
    `longest_average_seconds` is the longest time between storing a fragment and receiving its average. The worker
    merges an average `overlap` inner steps after it stored the fragment.
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
    """Reply: the mean held-out loss, in nats per token, over `tokens` predicted tokens."""

    loss: float
    tokens: int


class Generated(Reply):
    """Reply: the generated text, without the prompt."""

    text: str


class Exported(Reply):
    """Reply: the exported model folder is complete."""


class MomentsMoved(Reply):
    """Reply: the moments were written or loaded or, if there is a `problem`, were not. Training continues even then."""

    problem: str | None = None


class Failed(Reply):
    """Reply: a command failed. `error` is the class name of the worker's error, such as a key of `EXPECTED_ERRORS`."""

    error: str
    message: str
    remedy: str
    traceback: str


def patience(slowest_step: float | None) -> float:
    """Return the seconds for which a worker in training may send no report, and its collective operations may block.
    `slowest_step` is the duration of its slowest inner step so far, in seconds, or None before the first one."""
    return SETTING_UP if slowest_step is None else max(LEAST_PATIENCE, STEPS_OF_PATIENCE * slowest_step)


# Failures ------------------------------------------------------------------------------------------------------------
EXPECTED_ERRORS: dict[str, type[DilocoPeerError]] = {
    error.__name__: error
    for error in (DataError, DeviceError, DeviceMemoryError, MachineError, ManifestError, WorkerError)
}


class UnexpectedWorkerError(WorkerError):
    """The worker failed with an error that is not in `EXPECTED_ERRORS`."""


def _rebuild(failure: Failed) -> DilocoPeerError:
    """Return the error that `failure` describes, with the worker's traceback as a note."""
    expected = EXPECTED_ERRORS.get(failure.error)
    error: DilocoPeerError
    if expected is not None:
        error = expected(failure.message, failure.remedy)
    else:
        logger.error("unexpected error in the worker:\n%s", failure.traceback.rstrip())
        message = f"the worker failed: {failure.error}: {failure.message}."
        error = UnexpectedWorkerError(message, "This may be a bug; report it.")
    error.add_note(f"In the worker:\n{failure.traceback}")
    return error


# A worker process ----------------------------------------------------------------------------------------------------
Answer = TypeVar("Answer", bound=ControlMessage)


class _LastWords:
    """The last lines that a worker has printed, cleaned for display: without colours, and with only the final state of
    each progress bar."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)

    def heard(self, line: str) -> None:
        """Clean a line that the worker has printed, and keep the result unless it is blank."""
        plain = TERMINAL_COMMANDS.sub("", line).rstrip().rpartition("\r")[2].replace("\t", "    ")[:LINE_LENGTH]
        shown = "".join(character if character.isprintable() else " " for character in plain)
        if shown.strip():
            self._lines.append(shown)
            logger.debug("the worker prints: %s", shown)

    def sentence(self) -> str:
        """Return the last kept lines as a sentence for an error message, or "" if no line was kept."""
        lines = [line.strip() for line in self._lines][-IN_A_SENTENCE:]
        return f" It printed last: {' | '.join(lines)}" if lines else ""

    def device_failure(self) -> str:
        """Return the last kept line that reports a device failure, or "" if there is none. NCCL prints such a line
        before it ends the process."""
        failures = (line.strip() for line in reversed(self._lines) if DEVICE_FAILURE.search(line))
        return next(failures, "")

    def log(self, name: str) -> None:
        if self._lines:
            logger.error("%s printed last:\n%s", name, "\n".join(f"    {line}" for line in self._lines))


class WorkerDeathError(WorkerError):
    """The worker's process has ended."""


class WorkerProcess:
    """A worker process, as the peer process controls it. It carries out one command at a time; only a command to write
    or load the optimizer's moments may run beside another command. Create a `WorkerProcess` with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, on_stage: Watch) -> None:
        self.name = "the worker"
        self._on_stage = on_stage
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._moments_replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self.death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()
        """The error to raise once the worker is dead."""
        self._process = process
        self._writer: asyncio.StreamWriter
        self._output = _LastWords()
        self._is_ended = False
        """True once this object has ended the worker on purpose."""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, inherited: Sequence[int], threads: int, on_stage: Watch = lambda stage, share: None) -> Self:
        """Start a worker process with this many CPU `threads` that inherits the file descriptors in `inherited`.
        `on_stage` is called with each stage that the worker reports."""
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
        """Send a message to the worker. If the worker is dead, drop the message; `death` then holds the error."""
        if not self._writer.is_closing():
            self._writer.write(message.line())

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_report: Callable[[Report], None]
    ) -> Answer:
        """Send a command and return the worker's answer. The caller must not cancel this call, because the next call
        would then return the answer to this command.

        Raises: the worker's error, rebuilt as an error of this project; WorkerDeathError when the worker dies.
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
        """Send a command to write or load the optimizer's moments, and wait for the reply. A command of another kind
        may run at the same time.

        Raises: SnapshotError when the worker cannot move them; WorkerDeathError when it dies.
        """
        self.write(command)
        reply = await self._next(self._moments_replies)
        assert isinstance(reply, MomentsMoved)
        if reply.problem is not None:
            raise SnapshotError(reply.problem)

    def kill(self) -> None:
        """Kill the worker without waiting for its end. Callers that wait for its replies get a WorkerDeathError."""
        self._is_ended = True
        self._kill()
        self._end(WorkerDeathError(f"{self.name} was ended."))

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the worker by closing its control channel. Kill it if it does not exit within `CLOSE_SECONDS`.

        Afterwards no process is left, unless `is_running` is still true: the kernel cannot end a process that waits for
        a GPU's driver.
        """
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
        """Handle one line from the worker's control channel. Raises: ValueError if the line is no control message."""
        reply = Reply.parse(line)
        if isinstance(reply, AtStage):
            self._on_stage(reply.stage, reply.share)
        elif isinstance(reply, MomentsMoved):
            self._moments_replies.put_nowait(reply)
        else:
            self._replies.put_nowait(reply)

    def _end(self, death: DilocoPeerError) -> None:
        """Record why the worker is dead, and wake all callers that wait for its replies."""
        if not self.death.done():
            self.death.set_result(death)
            self._replies.put_nowait(None)
            self._moments_replies.put_nowait(None)

    async def _next(self, replies: asyncio.Queue[Reply | None]) -> Reply:
        """Wait for the next reply in a queue, and return it. Raises: the error in `death` if the worker is dead."""
        reply = await replies.get()
        if reply is None:
            replies.put_nowait(None)  # wakes the next caller that waits for a reply
            raise self.death.result()
        return reply

    async def _ended(self) -> None:
        """Wait until the process has ended. `Process.wait` alone is not enough: in some versions of asyncio it also
        waits for other processes that hold the worker's output, such as a compiler that hangs."""
        while self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), LOOK_SECONDS)

    async def _read_replies(self, reader: asyncio.StreamReader, output: asyncio.Task[None]) -> None:
        try:
            while line := await reader.readline():
                self._hear(line)
        except ConnectionError:  # the worker ended before it had read all commands
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
            with contextlib.suppress(ValueError):  # asyncio has dropped a line longer than the reader's limit
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
    """Start a worker process, with its end of the control channel as descriptor `control`, and its output in a pipe."""
    with signals_held_back():  # otherwise Ctrl-C would end the worker before a leaving peer could finish its round
        return await asyncio.create_subprocess_exec(
            *module_command("opendiloco.workers.worker", str(control)),
            pass_fds=(control, *inherited),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=child_environment(OMP_NUM_THREADS=str(threads), **LOOPBACK_ONLY, **_allocator()),
        )


def _allocator() -> dict[str, str]:
    """Return environment variables that make torch's GPU allocator grow its segments, so that tensors of many sizes
    leave no gaps in GPU memory.

    There are none if the volunteer has configured the allocator. Workers on a CPU ignore them.
    """
    return {} if any(name in os.environ for name in ALLOCATOR) else {ALLOCATOR[0]: "expandable_segments:True"}
