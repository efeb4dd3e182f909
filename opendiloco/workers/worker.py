"""A worker process: trains, evaluates and exports on command. Started as `python -m opendiloco.workers.worker`.

It lives exactly as long as the control channel: when the peer process dies, however it dies, the channel closes and
the worker exits at once. Ctrl-C and other requests to end are the peer process's business alone: they reach the worker
blocked.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import WorkerError
from opendiloco.shared_memory import MemoryCap, SharedVectors, cap_memory
from opendiloco.stages import at_stage, watched_by
from opendiloco.workers.control import (
    AtStage,
    Command,
    Configure,
    Configured,
    ControlChannel,
    ControlMessage,
    CountDevices,
    DevicesCounted,
    EndInnerLoop,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    ForgetMoments,
    Generate,
    Generated,
    Hold,
    KeepMoments,
    MomentsMoved,
    MoveMoments,
    RecallMoments,
    RunInnerLoop,
    TakeAverage,
    describe_failure,
)
from opendiloco.workers.options import WorkerOptions

if TYPE_CHECKING:
    from opendiloco.data.tokenizer import Tokenizer
    from opendiloco.data.training_data import TrainingData
    from opendiloco.training.inner import ModelReplica


class Descriptors(NamedTuple):
    """The memory file of `SharedVectors`, which the peer process sees, too; and the socket at which workers meet, if
    this is the first."""

    vectors: int
    listener: int | None


class Worker:
    """A configured worker: model, data and shared vectors."""

    def __init__(self, command: Configure, descriptors: Descriptors, channel: ControlChannel) -> None:
        _keep_to(command.options)
        # Imported here, after the channel is being listened to: these take seconds. transformers takes most of them, so
        # it comes when it is known that there is a device to train on, and data.
        at_stage("importing torch")
        with nothing_collected():
            import torch

            from opendiloco.data.ahead import Ahead
            from opendiloco.data.token_files import TokenCache, few_tokens
            from opendiloco.data.tokenizer import build_tokenizer
            from opendiloco.data.training_data import load_data
            from opendiloco.training.team import choose_device, device_name

        torch.set_num_threads(command.threads)
        torch.set_float32_matmul_precision("high" if command.options.tf32 else "highest")
        self._channel = channel
        self._options = command.options
        self._config = RunConfig.from_manifest_content(command.manifest_content)
        device = choose_device(command.device)
        self._tokenizer: Tokenizer = build_tokenizer(self._config.tokenizer)
        few = few_tokens(self._config.tokenizer, command.workers)
        cache = TokenCache(few=few, is_shared=command.workers > 1)
        ahead = Ahead(self._config).tokenize if command.rank == 0 and command.options.trains else None
        self._data: TrainingData = load_data(self._config, self._tokenizer, cache, ahead)

        at_stage("importing transformers")
        with nothing_collected():
            from opendiloco.model.utilisation import flops_per_token
            from opendiloco.training.inner import ModelReplica
            from opendiloco.training.team import Team
            from opendiloco.workers.assembly import assemble_model, in_fitting_precision
            from opendiloco.workers.inner_loops import InnerLoops

        self._team = Team.meet(
            device, command.rank, command.workers, command.port, descriptors.listener, command.options.replicas
        )
        self._config = in_fitting_precision(self._config, self._team)
        memory = descriptors.vectors if command.fresh else None
        model = assemble_model(self._config, self._tokenizer, self._team, command.options, memory)
        reduces_once = command.options.reduces_once
        self._replica: ModelReplica = ModelReplica(
            self._config, model, self._data.samples, self._team, reduces_once=reduces_once
        )
        at_stage("trying how many windows fit")
        self._replica.micro_batch = self._choose_micro_batch()
        self._vectors = SharedVectors(descriptors.vectors, self._replica.layout.size)
        if command.options.trains:
            self._try_what_is_compiled()
        self._inner_loops = InnerLoops(
            self._config, self._replica, self._team, self._vectors, channel, self._carry_out_asides
        )
        layout, length = self._replica.layout, self._config.training.sequence_length
        held_out, windows = self._data.held_out, self._config.evaluation.windows
        self.description = Configured(
            parameters=layout.size,
            tokens_per_sample=length,
            device=str(device),
            device_name=device_name(device),
            flops_per_token=flops_per_token(model.config, layout.parameter_count, length),
            micro_batch=self._replica.micro_batch,
            held_out_digest=held_out.digest(windows),
            bytes_per_token=held_out.bytes_per_token(windows, self._tokenizer),
            fragments=tuple((part.start, part.stop) for part in layout.fragments),
        )

    def _try_what_is_compiled(self) -> None:
        """Choose how attention is computed, and whether blocks are compiled, by what works here."""
        from opendiloco.training.trials import document_attention, keep_compiled_if_it_works

        self._replica.load(self._vectors.theta)  # so far shards have whatever was in memory, and its loss may be none
        end = self._data.samples.document_end
        if end is not None and self._options.compile is not False:
            self._replica.attention = document_attention(self._replica, self._team, end)
        if self._replica.attention is None:
            keep_compiled_if_it_works(self._replica, self._team)

    def _choose_micro_batch(self) -> int:
        """Return what this machine's owner says; else as many windows as fit, up to what the run recommends."""
        from opendiloco.training.trials import fitting_micro_batch

        piece = self._team.largest_piece(self._config.training.batch_size)
        if self._options.micro_batch is not None:
            return min(self._options.micro_batch, piece)
        most = min(self._config.training.micro_batch or piece, piece)
        return fitting_micro_batch(self._replica, most, self._team, self._options.trains)

    def idled(self, seconds: float) -> None:
        """Hear for how long there was nothing to do before the next command came."""
        self._inner_loops.idled(seconds)

    def carry_out(self, command: Command) -> ControlMessage:
        """The reply to one command."""
        match command:
            case RunInnerLoop():
                return self._inner_loops.run(command)
            case Evaluate():
                return self._evaluate(command)
            case Generate():
                return self._generate(command)
            case Export():
                return self._export(command)
            case Configure() | CountDevices() | EndInnerLoop() | Hold() | TakeAverage():
                raise WorkerError(f"the command {command.kind} is out of place here.", "This is a bug; report it.")
            case _:
                return self._move_moments(command)

    def _carry_out_asides(self) -> None:
        """While we train, the peer process asks for nothing that does not fit between two inner steps."""
        with suppress(queue.Empty):
            while True:
                self._channel.send(self.carry_out(self._channel.commands.get_nowait()))

    def _move_moments(self, command: MoveMoments) -> MomentsMoved:
        try:
            match command:
                case KeepMoments():
                    self._replica.keep_moments(Path(command.path), command.run, command.index)
                case RecallMoments():
                    self._replica.recall_moments(Path(command.path), command.run)
                case ForgetMoments():
                    self._replica.forget_moments()
        except Exception as error:  # whatever it is, training need not end of it
            return MomentsMoved(problem=str(error))
        return MomentsMoved()

    def _evaluate(self, command: Evaluate) -> Evaluated:
        """Each worker reads its piece of the windows; each forward pass takes all of them."""
        from opendiloco.model.evaluation import held_out_loss

        windows, at_once = command.windows, self.description.micro_batch
        sharers = None if self._team.mesh is None else self._team
        with self._replica.showing(self._vectors.theta) as model:
            precision = self._replica.precision
            loss, tokens = held_out_loss(model, self._data.held_out, windows, at_once, precision, sharers)
        return Evaluated(loss=loss, tokens=tokens)

    def _generate(self, command: Generate) -> Generated:
        from opendiloco.model.evaluation import generate_sample

        sampling = command.tokens, command.seed, command.temperature
        with self._whole_model() as model:
            return Generated(text=generate_sample(model, self._tokenizer, command.prompt, *sampling))

    def _export(self, command: Export) -> Exported:
        from opendiloco.model.export import export_model

        folder = Path(command.folder)
        with self._whole_model() as model:
            export_model(model, self._tokenizer, folder, self._config, command.facts, command.dtype)
        return Exported()

    @contextmanager
    def _whole_model(self) -> Iterator[Any]:
        """A model with theta in it: the worker's own, or one made for the purpose if that is sharded."""
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


def _keep_to(options: WorkerOptions) -> None:
    """Take no more of the machine than its owner gives."""
    os.nice(options.nice)
    if options.max_memory is not None:
        cap_memory(MemoryCap(options.max_memory, os.getppid()))


@contextmanager
def nothing_collected() -> Iterator[None]:
    """While it imports, Python would look for garbage again and again among half a million objects, of which most stay:
    a tenth of the time. It looks once instead, at the end, and never again at what it finds in use."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def serve(channel: ControlChannel, descriptors: Descriptors) -> None:
    """Carry out commands for as long as the process lives."""
    worker: Worker | None = None
    while True:
        began = time.monotonic()
        command = channel.commands.get()
        if worker is not None:
            worker.idled(time.monotonic() - began)
        try:
            if isinstance(command, Configure):
                worker = Worker(command, descriptors, channel)
                reply: ControlMessage = worker.description
            elif isinstance(command, CountDevices):
                reply = count_devices()
            elif worker is None:
                raise WorkerError("the worker is not configured yet.", "This is a bug; report it.")
            else:
                reply = worker.carry_out(command)
        except Exception as error:
            reply = describe_failure(error)
        channel.send(reply)


def count_devices() -> DevicesCounted:
    import torch

    return DevicesCounted(gpus=torch.cuda.device_count())


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by diloco-peer; not for use by hand.")
    parser.add_argument("--control", type=int, required=True, help="descriptor of the control socket")
    parser.add_argument("--memory", type=int, required=True, help="descriptor of the shared memory file")
    parser.add_argument("--listener", type=int, help="descriptor of the socket where the workers meet; the first's")
    arguments = parser.parse_args()
    faulthandler.enable()  # a crash in a library says where it was
    channel = ControlChannel(socket.socket(fileno=arguments.control))
    channel.start()
    with watched_by(lambda stage, share: channel.send(AtStage(stage=stage, share=share))):
        serve(channel, Descriptors(arguments.memory, arguments.listener))


if __name__ == "__main__":
    main()
