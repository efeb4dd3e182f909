"""A worker process, which trains, evaluates and exports on command. `python -m opendiloco.workers.worker` starts it.

It lives as long as the control channel: when the peer process ends in any way, the channel closes and the worker exits
at once. Only the peer process reacts to Ctrl-C and other requests to end; the worker has these signals blocked.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import DeviceError, DeviceMemoryError, MachineError, WorkerError, first_line
from opendiloco.gpus import DEVICE_FAILURE, LOOK_AT_DEVICE, read_cards, usable_gpus
from opendiloco.shared_memory import SharedVectors, Vector, cap_memory
from opendiloco.stages import at_stage, watched_by
from opendiloco.training.streaming import FragmentSchedule
from opendiloco.workers import control
from peers.errors import DilocoPeerError
from peers.values.system import make_private_folder

if TYPE_CHECKING:
    from opendiloco.data.tokenizer import Tokenizer
    from opendiloco.training.inner import InnerStep, InnerSteps, ModelReplica
    from opendiloco.training.team import Team

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # environment variable that names PyTorch's folder for compiled code
COLLECTED_EVERY = 50
"""Number of inner steps between two collections of Python's garbage. All workers collect after the same step. A step
leaves little garbage, and a collection takes milliseconds."""
LOOK_SECONDS = 0.1  # seconds between two checks for the peer process's commands during a pause


def _serve(channel: ControlChannel) -> None:
    """Carry out the peer process's commands, and send the replies, until the worker's process ends."""
    worker: Worker | None = None
    device = "the device"
    while True:
        began = time.monotonic()
        command = channel.commands.get()
        if worker is not None:
            worker.inner_loops.idled += time.monotonic() - began
        try:
            if isinstance(command, control.Configure):
                device = command.device
                worker = Worker(command, channel)
                reply: control.ControlMessage | None = worker.description
            elif isinstance(command, control.CountDevices):
                reply = _count_devices()
            elif worker is None:
                raise WorkerError("the worker is not configured yet.", "This is a bug; report it.")
            else:
                reply = worker.carry_out(command)
        except Exception as error:
            reply = _describe_failure(error, device)
        if reply is not None:
            channel.send(reply)


def _count_devices() -> control.DevicesCounted:
    """Return the number of GPUs that torch can use. If there are none although the machine has a GPU driver, also
    return the reason."""
    import torch

    gpus, reason = usable_gpus()
    cards, cuda = read_cards(), torch.version.cuda
    if gpus or not cuda or not cards.are_reachable:
        return control.DevicesCounted(gpus=gpus)
    problem, remedy = cards.hidden_from(torch.__version__, f"CUDA {cuda}", reason)
    return control.DevicesCounted(gpus=0, problem=problem, remedy=remedy)


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if the error means that a device has no memory left.

    Torch has a class only for errors of its own allocator. Failures of CUDA's libraries and NCCL are recognised by
    their text.
    """
    text = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "cublas_status_alloc_failed" in text)
    )


def _describe_failure(error: Exception, device: str = "the device") -> control.Failed:
    """Return the `Failed` message that describes an error of a worker on `device` to the peer process."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, ImportError):
        error = MachineError(f"a library of the training stack cannot be imported: {error}.", "Install it with pip.")
    text = str(error)
    if isinstance(error, RuntimeError) and "/dev/shm" in text and ("segment" in text or "No space left" in text):
        # NCCL needs more shared memory than the 64 MB that a container has by default.
        remedy = "In a container, enlarge it: docker run --shm-size 1g, or --ipc host. Otherwise train on one GPU."
        error = MachineError("/dev/shm is too small for the communication between this machine's GPUs.", remedy)
    if _is_out_of_memory(error):
        remedy = (
            "Use --micro-batch with a smaller number, --activation-checkpointing, --optimizer-state host or 8bit, or "
            "another device."
        )
        error = DeviceMemoryError("the device ran out of memory.", remedy)
    if isinstance(error, RuntimeError) and DEVICE_FAILURE.search(str(error)):
        error = DeviceError(f"{device} failed: {first_line(error)}", LOOK_AT_DEVICE)
    message, remedy = (error.message, error.remedy) if isinstance(error, DilocoPeerError) else (str(error), "")
    return control.Failed(error=type(error).__name__, message=message, remedy=remedy, traceback=trace)


# The control channel -------------------------------------------------------------------------------------------------
class _Average(NamedTuple):
    """The newest `TakeAverage` command for a fragment. `heard_at` is the time at which it arrived, in monotonic
    seconds."""

    number: int
    is_changed: bool
    heard_at: float


class ControlChannel:
    """The worker's end of the control channel. A separate thread reads the channel, so that the worker's process ends
    as soon as the channel closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.stopped_number = 0
        self._may_step = threading.Event()  # cleared while the machine's owner pauses training
        self._may_step.set()
        self._averages: dict[int, _Average] = {}
        self._news = threading.Event()
        self.commands: queue.SimpleQueue[control.Command] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def is_held(self, number: int) -> bool:
        """Wait up to `LOOK_SECONDS` for a pause to end. Return True if training `number` is still paused."""
        return number > self.stopped_number and not self._may_step.wait(LOOK_SECONDS)

    def send(self, message: control.ControlMessage) -> None:
        with self._sending:  # the thread that reads batches sends messages, too, about its progress in tokenizing
            self._connection.sendall(message.line())

    def average_of(self, fragment: int, number: int) -> _Average | None:
        """Return the newest `TakeAverage` command for `fragment` if it is for the weights that training `number`
        captured; otherwise None. `number` counts the trainings of these workers from 1."""
        average = self._averages.get(fragment)
        return average if average is not None and average.number == number else None

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so()` is true. Check it at once, and after each command that arrives. After each
        `ALIVE_SECONDS` without a command, send `Alive`."""
        while True:
            self._news.clear()
            if is_so():
                return
            while not self._news.wait(control.ALIVE_SECONDS):
                self.send(control.Alive())

    def take(self, command: control.Command) -> None:
        """Carry out `EndInnerLoop`, `Hold` and `TakeAverage` at once; put any other command into the queue
        `commands`."""
        match command:
            case control.EndInnerLoop():
                self.stopped_number = command.number
            case control.Hold():
                (self._may_step.clear if command.held else self._may_step.set)()
            case control.TakeAverage():
                self._averages[command.fragment] = _Average(command.number, command.is_changed, time.monotonic())
            case _:
                self.commands.put(command)
        self._news.set()

    def _read(self) -> None:
        """Receive commands until the channel closes. Then end the process with `_exit`, because nothing else interrupts
        training."""
        try:
            for line in self._connection.makefile("rb"):
                self.take(control.Command.parse(line))
        except ConnectionError:
            pass
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


# Commands ------------------------------------------------------------------------------------------------------------
class Worker:
    """A configured worker, with its model, data and shared vectors. It carries out commands one after the other."""

    def __init__(self, command: control.Configure, channel: ControlChannel) -> None:
        os.nice(command.options.nice)
        self._cache = _own_cache(command.options.compile_cache)
        cap_memory(command.options.max_memory, os.getppid())
        # These imports take seconds, so the thread that reads the channel starts before them. transformers takes the
        # longest, so it is imported last, once the device and the data have been found.
        at_stage("importing torch")
        with _nothing_collected():
            import torch

            from opendiloco.data.ahead import AheadTokenizer
            from opendiloco.data.token_files import TokenCache, most_tokens_in_memory
            from opendiloco.data.tokenizer import build_tokenizer
            from opendiloco.data.training_data import TrainingData, load_data
            from opendiloco.training.optimizers import check_inner_optimizer
            from opendiloco.training.team import choose_device, device_name

        torch.set_num_threads(command.threads)
        torch.set_float32_matmul_precision("high" if command.options.tf32 else "highest")
        self._channel = channel
        self._options = command.options
        self._config = RunConfig.from_manifest_content(command.manifest_content)
        device = choose_device(command.device)
        check_inner_optimizer(self._config.inner_optimizer, command.options.optimizer_state)
        self._tokenizer: Tokenizer = build_tokenizer(self._config.tokenizer)
        few = most_tokens_in_memory(self._config.tokenizer, command.workers)
        cache = TokenCache(few=few, is_shared=command.workers > 1)
        ahead = AheadTokenizer(self._config).tokenize if command.rank == 0 and command.options.trains else None
        self._data = (
            load_data(self._config, self._tokenizer, cache, ahead)
            if command.options.reads
            else TrainingData.blank(self._config.training.sequence_length)
        )

        at_stage("importing transformers")
        with _nothing_collected():
            from opendiloco.model.parameters import multiplied_weights, pin
            from opendiloco.model.utilisation import flops_per_token
            from opendiloco.training.inner import ModelReplica
            from opendiloco.training.team import Team
            from opendiloco.training.trials import compiled_blocks, enlarge_micro_batch
            from opendiloco.workers.assembly import assemble_model, in_fitting_precision

        self._team = Team.meet(
            device, command.rank, command.workers, command.port, command.listener, command.options.replicas
        )
        self._config = in_fitting_precision(self._config, self._team)
        memory = command.memory if command.fresh else None
        model = assemble_model(self._config, self._tokenizer, self._team, command.options, memory)
        self._replica: ModelReplica = ModelReplica(
            self._config,
            model,
            self._data.samples,
            self._team,
            reduces_once=command.options.reduces_once,
            optimizer_state=command.options.optimizer_state,
        )
        self._replica.micro_batch = self._choose_micro_batch()
        self._vectors = SharedVectors(command.memory, self._replica.layout.size)
        pin(self._vectors.both, device)
        uncompiled = ""
        if command.options.trains:
            uncompiled = self._try_what_is_compiled()
            if command.options.micro_batch is None:
                works = enlarge_micro_batch(self._replica, self._config.training.batch_size, self._team)
                uncompiled = uncompiled if works else self._try_what_is_compiled()
        self.inner_loops = InnerLoops(
            self._config, self._replica, self._team, self._vectors, channel, self._carry_out_asides
        )
        layout, length = self._replica.layout, self._config.training.sequence_length
        held_out, windows = self._data.held_out, self._config.evaluation.windows
        self.description = control.Configured(
            parameters=layout.size,
            device=str(device),
            device_name=device_name(device),
            flops_per_token=flops_per_token(model.config, multiplied_weights(model), length),
            micro_batch=self._replica.micro_batch,
            uncompiled_micro_batch=self._replica.uncompiled_micro_batch or self._replica.micro_batch,
            held_out_digest=held_out.digest(windows),
            bytes_per_token=held_out.bytes_per_token(windows, self._tokenizer),
            fragments=tuple((part.start, part.stop) for part in layout.fragments),
            is_compiled=bool(compiled_blocks(model)),
            uncompiled=uncompiled,
        )
        _freeze()

    def _try_what_is_compiled(self) -> str:
        """Choose how attention is computed and whether blocks are compiled, by trials on this machine. Return the
        reason if blocks should be compiled but are not; otherwise an empty string."""
        from opendiloco.training.team import compiling_lacks
        from opendiloco.training.trials import document_attention, keep_compiled_if_it_works

        self._replica.load(self._vectors.theta)  # without theta, shards are uninitialised memory, whose loss may be NaN
        end = self._data.samples.document_end
        if end is not None and self._options.compile is not False:
            self._replica.attention = document_attention(self._replica, self._team, end, self._cache)
        if self._replica.attention is not None:
            return ""
        if self._options.compile is None and self._team.device.type == "cuda":
            lacking = compiling_lacks(self._team.device)
            if lacking is not None:
                return lacking
        return keep_compiled_if_it_works(self._replica, self._team, self._cache)

    def _choose_micro_batch(self) -> int:
        """Return the number of windows to compute at once: the owner's choice, or as many as fit in memory, up to the
        number that the run recommends. On a GPU it may grow later, when training's memory use is known."""
        from opendiloco.training.trials import fitting_micro_batch

        piece = self._team.largest_piece(self._config.training.batch_size)
        if not self._options.reads:
            return 1  # no windows are computed
        at_stage("trying how many windows fit")
        if self._options.micro_batch is not None:
            return min(self._options.micro_batch, piece)
        most = min(self._config.training.micro_batch or piece, piece)
        return fitting_micro_batch(self._replica, most, self._team, self._options.trains)

    def carry_out(self, command: control.Command) -> control.ControlMessage | None:
        """Carry out one command and return the reply, or None if a thread sends the reply later."""
        match command:
            case control.RunInnerLoop():
                self._data.samples.mix(command.mixtures)
                return self.inner_loops.run(command)
            case control.Evaluate():
                return self._evaluate(command)
            case control.Generate():
                return self._generate(command)
            case control.Export():
                return self._export(command)
            case control.MoveMoments():
                return self._move_moments(command)
            case _:
                raise WorkerError(f"{type(command).__name__} is out of place here.", "This is a bug; report it.")

    def _carry_out_asides(self) -> None:
        """Carry out the queued commands, which write or load the inner optimizer's moments. If there are several
        workers, do nothing, because they do this between trainings."""
        if self._team.size > 1:
            return
        with suppress(queue.Empty):
            while True:
                if (reply := self.carry_out(self._channel.commands.get_nowait())) is not None:
                    self._channel.send(reply)

    def _move_moments(self, command: control.MoveMoments) -> control.MomentsMoved | None:
        """Write or load the inner optimizer's moments and return the reply. If a thread writes them, return None,
        because the thread sends the reply later."""
        write = None
        try:
            match command:
                case control.KeepMoments():
                    write = self._replica.keep_moments(Path(command.path), command.run, command.index)
                case control.RecallMoments():
                    self._replica.recall_moments(Path(command.path), command.run)
        except Exception as error:  # a failure to move moments must not stop training
            return control.MomentsMoved(problem=str(error))
        if write is None:
            return control.MomentsMoved()
        threading.Thread(target=self._write_moments, args=(write,), daemon=True).start()
        return None

    def _write_moments(self, write: Callable[[], None]) -> None:
        problem = None
        try:
            write()
        except Exception as error:
            problem = str(error)
        self._channel.send(control.MomentsMoved(problem=problem))

    def _evaluate(self, command: control.Evaluate) -> control.Evaluated:
        """Return the held-out loss of theta. Each worker reads its part of the windows, and all workers take part in
        each forward pass."""
        from opendiloco.training.evaluation import held_out_loss

        windows, at_once = command.windows, self.description.uncompiled_micro_batch
        with self._replica.showing(self._vectors.theta) as model:
            precision = self._replica.precision
            loss, tokens = held_out_loss(model, self._data.held_out, windows, at_once, precision, self._team)
        return control.Evaluated(loss=loss, tokens=tokens)

    def _generate(self, command: control.Generate) -> control.Generated:
        from opendiloco.training.evaluation import generate_sample

        sampling = command.tokens, command.seed, command.temperature
        with self._whole_model() as model:
            return control.Generated(text=generate_sample(model, self._tokenizer, command.prompt, *sampling))

    def _export(self, command: control.Export) -> control.Exported:
        from opendiloco.model.export import export_model

        folder = Path(command.folder)
        with self._whole_model() as model:
            export_model(model, self._tokenizer, folder, self._config, command.facts, command.dtype)
        return control.Exported()

    @contextmanager
    def _whole_model(self) -> Iterator[Any]:
        """Yield a whole model that holds theta: the worker's own, or a new one if the worker's model is sharded."""
        from opendiloco.model.build import build_model
        from opendiloco.model.parameters import Shards, is_all_trained, trainable

        if self._team.mesh is None:
            with self._replica.showing(self._vectors.theta) as own:
                yield own
            return
        draws = not is_all_trained(self._replica.model)
        model = build_model(self._config, self._tokenizer, draws=draws, threads=self._options.threads)
        Shards(self._replica.layout).load(self._vectors.theta, trainable(model))
        yield model


def _own_cache(folder: str | None) -> Path | None:
    """Make PyTorch's compiler and Triton keep compiled code in `folder`. Return the folder, or None if it is not used.

    The folder is not used if the machine's owner has named another one or if it cannot be made private.
    """
    if folder is None or os.environ.get(CACHE_VARIABLE):
        return None
    try:
        make_private_folder(Path(folder))  # no other user may write here: compiled code is loaded from this folder
    except OSError:
        return None
    os.environ[CACHE_VARIABLE] = folder
    return Path(folder)


@contextmanager
def _collected_by_hand() -> Iterator[None]:
    """Turn off Python's automatic garbage collection in a `with` block: one collecting worker makes all others wait."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Turn off Python's garbage collection in a `with` block that imports, and collect once at its end.

    Otherwise Python would search half a million objects for garbage again and again, which takes a tenth of the time.
    Objects that are in use at the end are never searched again.
    """
    with _collected_by_hand():
        try:
            yield
        finally:
            _freeze()


def _freeze() -> None:
    """Collect Python's garbage now, and exclude all remaining objects from later collections."""
    gc.collect()
    gc.freeze()


# Training ------------------------------------------------------------------------------------------------------------
class InnerLoops:
    """The runner of a worker's trainings. Between inner steps and while it waits, it calls `carry_out_asides`, which
    carries out commands to write the inner optimizer's moments to a file, or to load them from one."""

    def __init__(
        self,
        config: RunConfig,
        replica: ModelReplica,
        team: Team,
        vectors: SharedVectors,
        channel: ControlChannel,
        carry_out_asides: Callable[[], None],
    ) -> None:
        self._config = config
        self._replica, self._team, self._vectors, self._channel = replica, team, vectors, channel
        self._carry_out_asides = carry_out_asides
        self._cycles = FragmentSchedule(self.store, self.merge, len(replica.layout.fragments), config.streaming)
        #: By fragment: the number of the training that last stored it, and the time of that store in monotonic seconds.
        self._stored: dict[int, tuple[int, float]] = {}
        self._number = 0
        self.idled = 0.0
        """Seconds for which the worker had nothing to do since its last training."""

    def run(self, command: control.RunInnerLoop) -> control.InnerLoopDone:
        """Carry out a training and return its results. If the training continues the previous one, the worker's idle
        time between the two counts as waiting for an average."""
        from opendiloco.training.team import forget_peak_memory, peak_memory

        self._average_wait_seconds = self.idled if command.goes_on else 0.0
        self._held = self.idled = self._longest_average = 0.0
        self._number, self._began, self._late = command.number, time.monotonic() - self._average_wait_seconds, 0
        forget_peak_memory(self._team.device)
        begin_with = self._vectors.local if command.from_local else self._vectors.theta
        inner_steps = self._replica.inner_steps(
            None if command.goes_on else begin_with,
            *(command.index, command.samples, command.steps, command.tokens),
            self._is_stopped,
            command.overrides,
        )
        is_last = command.index + 1 == command.overrides.total_outer_steps(self._config)
        self._cycles.begin(inner_steps.planned, self._reported(inner_steps), command.overlap, command.goes_on, is_last)
        self._wait_while_held()
        with _collected_by_hand():
            self._pass_through(inner_steps)
        trained = inner_steps.trained
        return control.InnerLoopDone(
            tokens=trained.tokens,
            inner_steps=trained.inner_steps,
            loss=trained.loss,
            gradient_norm=trained.gradient_norm,
            learning_rate=self._replica.learning_rate,
            skipped=trained.skipped,
            seconds=time.monotonic() - self._began - self._held,
            waited_seconds=trained.waited_seconds,
            peak_memory_bytes=peak_memory(self._team.device),
            late_averages=self._late,
            average_wait_seconds=self._average_wait_seconds,
            longest_average_seconds=self._longest_average,
            overlap=command.overlap,
        )

    def _pass_through(self, inner_steps: InnerSteps) -> None:
        """Take the inner steps, and store each fragment when it is due. If training stops early, store the fragment
        with the highest number at once, and none of the others that are not due yet."""
        last = len(self._replica.layout.fragments) - 1
        local = self._vectors.local
        is_whole = True
        for fragment in range(last + 1):
            is_whole = is_whole and self._cycles.train_up_to(fragment, local)
            if is_whole or fragment == last:
                self._cycles.store(local, fragment)
                done = inner_steps.trained
                samples, tokens = done.samples, done.tokens
                if is_whole:
                    samples, tokens = inner_steps.planned_samples, inner_steps.planned_tokens
                stored = control.FragmentStored(fragment=fragment, samples=samples, tokens=tokens, loss=done.loss)
                self._channel.send(stored)
        if is_whole:
            self._cycles.train_to_the_end(local)

    def store(self, flat: Vector, fragment: int) -> None:
        self._replica.store(flat, fragment)
        self._stored[fragment] = self._number, time.monotonic()

    def merge(self, theta: Vector, fragment: int, alpha: float) -> None:
        """Wait for a fragment's average, and replace the fragment's weights w by alpha * w + (1 - alpha) * `theta`.
        Merge nothing if the average changes nothing or the training is stopped."""
        (number, stored_at), began = self._stored[fragment], time.monotonic()

        def is_decided() -> bool:
            self._carry_out_asides()
            return self._channel.average_of(fragment, number) is not None or self._is_stopped()

        if self._channel.average_of(fragment, number) is None:
            self._late += 1
            self._channel.wait_until(is_decided)
            self._average_wait_seconds += time.monotonic() - began
        if (average := self._channel.average_of(fragment, number)) is not None:
            self._longest_average = max(self._longest_average, average.heard_at - stored_at)
            if average.is_changed:
                self._replica.merge(theta, fragment, alpha)

    def _is_stopped(self) -> bool:
        return self._number <= self._channel.stopped_number

    def _wait_while_held(self) -> None:
        """Wait until the machine's owner resumes training, or this training is to end."""
        began = time.monotonic()
        while self._channel.is_held(self._number):
            self._carry_out_asides()
        self._held += time.monotonic() - began

    def _reported(self, inner_steps: InnerSteps) -> Iterator[InnerStep]:
        """Take the inner steps, report each to the peer process, and yield it. Between two steps, write or load the
        optimizer's moments on command, collect garbage, and wait while training is paused."""
        began, slowest = time.monotonic(), 0.0
        for step in inner_steps.every():
            if (seconds := time.monotonic() - began) > slowest:
                slowest = seconds
                # Workers may wait hours for each other before their first inner step. From then on, the slowest inner
                # step determines how long this worker may wait.
                self._team.wait_at_most(control.patience(slowest))
            if step.number % COLLECTED_EVERY == 0:
                gc.collect()
            if step.is_finite:
                if self._team.rank == 0:
                    trained = step.samples * self._config.training.sequence_length
                    seconds = time.monotonic() - self._began - self._held - self._average_wait_seconds
                    progress = control.InnerStepDone(
                        inner_step=step.number,
                        loss=step.loss,
                        gradient_norm=step.gradient_norm,
                        learning_rate=self._replica.learning_rate,
                        tokens_per_second=trained / seconds,
                        slowest_seconds=slowest,
                    )
                    self._channel.send(progress)
                self._carry_out_asides()
                self._wait_while_held()
            else:
                self._channel.send(control.Alive())
            yield step
            began = time.monotonic()


def main() -> None:
    """Carry out commands from the control channel, whose descriptor is the only argument, until the process ends."""
    faulthandler.enable()  # prints Python's traceback when a C library crashes
    channel = ControlChannel(socket.socket(fileno=int(sys.argv[1])))
    channel.start()
    with watched_by(lambda stage, share: channel.send(control.AtStage(stage=stage, share=share))):
        _serve(channel)


if __name__ == "__main__":
    main()
