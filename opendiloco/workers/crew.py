"""The present workers of a volunteer: started on all its machines, numbered through, and told what each of them is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from opendiloco.config.run_config import RunConfig
from opendiloco.cores import usable_cores
from opendiloco.errors import IslandError, WorkerError
from opendiloco.stages import at_stage
from opendiloco.workers.control import (
    Configure,
    Configured,
    ControlMessage,
    CountDevices,
    DevicesCounted,
    LeaseDigested,
    Report,
)
from opendiloco.workers.failures import UnexpectedWorkerError
from opendiloco.workers.handle import Answer, WorkerHandle
from opendiloco.workers.nodes import LOOPBACK, Node, Nodes
from opendiloco.workers.options import WorkerOptions, choose_devices, choose_threads, needs_gpu_count
from opendiloco.workers.process import Inherited, WorkerProcess
from opendiloco.workers.start_up import StartUp

EXPLANATION_SECONDS = 2.0
"""How long we wait, once a worker has failed, for what the others have to say: one of them may be the cause."""
KEY_BYTES = 8
MUST_AGREE: Mapping[type[ControlMessage], Sequence[str]] = {
    Configured: ("parameters", "tokens_per_sample", "text_digest", "held_out_digest", "bytes_per_token"),
    LeaseDigested: ("lease_digest",),
}
"""Of what a worker says: what follows from the run and its data alone."""


@dataclass(frozen=True)
class _Place:
    """A worker, and what it trains on."""

    worker: WorkerHandle
    device: str
    threads: int


class Crew:
    """Made empty; `start` fills it. `workers` are all that have been started, in the end ordered by rank."""

    def __init__(self, memory: Inherited, nodes: Nodes, is_wanted: Callable[[], bool]) -> None:
        self.workers: list[WorkerHandle] = []
        self._memory = memory
        self._nodes = nodes
        self._is_wanted = is_wanted
        self._machines: list[list[_Place]] = []
        self._port = nodes.port

    async def start(self, options: WorkerOptions) -> None:
        """Start workers on all machines, as many on each as it has devices.

        Raises: MachineError when there are too few; WorkerError when one dies, or none are wanted any more;
        IslandError, also when some machines have GPUs and others not.
        """
        starts = [self._start_here(options), *(self._start_there(node, options) for node in self._nodes.others)]
        started = await asyncio.gather(*starts, return_exceptions=True)
        for machine in started:
            if isinstance(machine, BaseException):
                raise machine
            self._machines.append(machine)
        self._check_devices()
        self.workers = [place.worker for place in self._places()]
        start_up = StartUp()

        def heard(stage: str, share: float | None) -> None:
            start_up.heard(stage, share)
            at_stage(stage, share)  # for whoever watches this process

        self.workers[0].on_stage = heard  # the others do the same
        if len(self.workers) > 1:
            for rank, worker in enumerate(self.workers):
                worker.name = f"worker {rank} of {len(self.workers)}"

    @property
    def device(self) -> str:
        """What they train on, in words."""
        devices = [place.device for place in self._places()]
        if len(devices) == 1:
            return devices[0]
        machines = f" on {len(self._machines)} machines" if len(self._machines) > 1 else ""
        return f"{len(devices)} x {_kind(devices[0])}{machines}"

    def commands(self, config: RunConfig, options: WorkerOptions, fresh: bool) -> list[Configure]:
        """Return what each worker is to be told, in their order."""
        content = config.to_manifest_content()
        key = os.urandom(KEY_BYTES).hex() if self._nodes.others else ""
        commands = list[Configure]()
        for machine in self._machines:
            first = len(commands)
            commands += [
                Configure(
                    manifest_content=content,
                    options=options,
                    threads=place.threads,
                    device=place.device,
                    rank=first + number,
                    workers=len(self.workers),
                    first_here=first,
                    here=len(machine),
                    host=self._nodes.host,
                    port=self._port,
                    key=key,
                    fresh=fresh,
                )
                for number, place in enumerate(machine)
            ]
        return commands

    def check_alike(self, answers: Sequence[Configured] | Sequence[LeaseDigested]) -> None:
        """Compare what the workers have made of the run. Raises: IslandError, which names the first that differs."""
        for worker, answer in zip(self.workers, answers, strict=True):
            for name in MUST_AGREE[type(answer)]:
                here, there = getattr(answers[0], name), getattr(answer, name)
                if here != there:
                    raise IslandError(
                        f"{_machine_of(worker)} has {name} = {there}, {_machine_of(self.workers[0])} has {here}.",
                        "Give all machines the same data, in the same place.",
                    )

    def _check_devices(self) -> None:
        """Those of one kind would wait for the others for good."""
        first, *others = [machine[0] for machine in self._machines]
        for other in others:
            if _kind(other.device) != _kind(first.device):
                raise IslandError(
                    f"{_machine_of(other.worker)} trains on {_kind(other.device)}, "
                    f"{_machine_of(first.worker)} on {_kind(first.device)}.",
                    "See whether torch finds the GPUs of each machine, or use --device cpu.",
                )

    async def exchange(
        self,
        commands: Sequence[ControlMessage],
        answer: type[Answer],
        hold: Callable[[asyncio.Task[Answer]], asyncio.Task[Answer]],
        on_report: Callable[[Report], None] | None = None,
    ) -> list[Answer]:
        """Give each of the first workers its command, in tasks that are kept by `hold`; return their answers.

        Raises: what most probably was the cause, when one fails.
        """
        report = on_report or (lambda report: None)
        pairs = zip(self.workers, commands, strict=False)
        tasks = [hold(asyncio.create_task(worker.exchange(command, answer, report))) for worker, command in pairs]
        _, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if unfinished:
            await asyncio.wait(unfinished, timeout=EXPLANATION_SECONDS)
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            raise min(errors, key=_is_unexpected)
        return [task.result() for task in tasks]

    def _places(self) -> list[_Place]:
        return list(chain.from_iterable(self._machines))

    async def _start_here(self, options: WorkerOptions) -> list[_Place]:
        if self._nodes.others:
            memory = self._memory._replace(surroundings={})  # the owner's own variables say which interface leads there

            async def start_worker(threads: int) -> WorkerHandle:
                return await WorkerProcess.start(memory, threads)

            return await self._start_on(start_worker, options, usable_cores())
        with socket.create_server((LOOPBACK, 0)) as listener:
            self._port = listener.getsockname()[1]
            listeners = iter([listener.fileno()])

            async def start_beside(threads: int) -> WorkerHandle:
                return await WorkerProcess.start(self._memory._replace(listener=next(listeners, None)), threads)

            return await self._start_on(start_beside, options, usable_cores())

    async def _start_there(self, node: Node, options: WorkerOptions) -> list[_Place]:
        return await self._start_on(node.start_worker, options, node.cores)

    async def _start_on(
        self, start_worker: Callable[[int], Awaitable[WorkerHandle]], options: WorkerOptions, cores: int
    ) -> list[_Place]:
        """Start the workers of one machine; the first, which is there in any case, counts its GPUs."""
        threads = choose_threads(options, ["cpu"] * options.cpu_workers, cores)  # at most
        first = await start_worker(threads)
        self.workers.append(first)
        if not self._is_wanted():
            raise WorkerError("no workers are wanted any more.")
        gpus = 0
        if needs_gpu_count(options):
            gpus = (await first.exchange(CountDevices(), DevicesCounted, lambda progress: None)).gpus
        devices = choose_devices(options, gpus)
        threads = choose_threads(options, devices, cores)
        places = [_Place(first, devices[0], threads)]
        for device in devices[1:]:
            worker = await start_worker(threads)
            self.workers.append(worker)
            places.append(_Place(worker, device, threads))
        return places


def _is_unexpected(error: BaseException) -> bool:
    """Return whether this is such as what a collective raises when another worker is gone."""
    return isinstance(error, UnexpectedWorkerError)


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _machine_of(worker: WorkerHandle) -> str:
    return "node 0" if worker.node is None else worker.node.name
