"""The present workers of a volunteer: started, numbered through, and told what each of them is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from opendiloco.config.run_config import RunConfig
from opendiloco.cores import usable_cores
from opendiloco.errors import WorkerError
from opendiloco.stages import at_stage
from opendiloco.workers.control import Configure, ControlMessage, CountDevices, DevicesCounted, Report
from opendiloco.workers.failures import UnexpectedWorkerError
from opendiloco.workers.options import WorkerOptions, choose_devices, choose_threads, needs_gpu_count
from opendiloco.workers.process import Answer, Inherited, WorkerProcess
from opendiloco.workers.start_up import StartUp

LOOPBACK = "127.0.0.1"
EXPLANATION_SECONDS = 2.0
"""How long we wait, once a worker has failed, for what the others have to say: one of them may be the cause."""


class Crew:
    """Made empty; `start` fills it. `workers` are all that have been started, ordered by rank."""

    def __init__(self, memory: Inherited, is_wanted: Callable[[], bool]) -> None:
        self.workers: list[WorkerProcess] = []
        self._memory = memory
        self._is_wanted = is_wanted
        self._devices: list[str] = []
        self._threads = 1
        self._port = 0

    async def start(self, options: WorkerOptions) -> None:
        """Start as many workers as this machine has devices; the first, which is there in any case, counts its GPUs.

        Raises: MachineError when there are too few; WorkerError when one dies, or none are wanted any more.
        """
        with socket.create_server((LOOPBACK, 0)) as listener:
            self._port = listener.getsockname()[1]
            threads = choose_threads(options, ["cpu"] * options.cpu_workers, usable_cores())  # at most
            first = await WorkerProcess.start(self._memory._replace(listener=listener.fileno()), threads)
        self.workers.append(first)
        if not self._is_wanted():
            raise WorkerError("no workers are wanted any more.")
        gpus = 0
        if needs_gpu_count(options):
            gpus = (await first.exchange(CountDevices(), DevicesCounted, lambda progress: None)).gpus
        self._devices = choose_devices(options, gpus)
        self._threads = choose_threads(options, self._devices, usable_cores())
        for _ in self._devices[1:]:
            self.workers.append(await WorkerProcess.start(self._memory, self._threads))
        start_up = StartUp()

        def heard(stage: str, share: float | None) -> None:
            start_up.heard(stage, share)
            at_stage(stage, share)  # for whoever watches this process

        first.on_stage = heard  # the others do the same
        if len(self.workers) > 1:
            for rank, worker in enumerate(self.workers):
                worker.name = f"worker {rank} of {len(self.workers)}"

    @property
    def device(self) -> str:
        """What they train on, in words."""
        first, *others = self._devices
        return f"{len(self._devices)} x {first.partition(':')[0]}" if others else first

    def commands(self, config: RunConfig, options: WorkerOptions, fresh: bool) -> list[Configure]:
        """Return what each worker is to be told, in their order."""
        content = config.to_manifest_content()
        return [
            Configure(
                manifest_content=content,
                options=options,
                threads=self._threads,
                device=device,
                rank=rank,
                workers=len(self.workers),
                port=self._port,
                fresh=fresh,
            )
            for rank, device in enumerate(self._devices)
        ]

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


def _is_unexpected(error: BaseException) -> bool:
    """Return whether this is such as what a collective raises when another worker is gone."""
    return isinstance(error, UnexpectedWorkerError)
