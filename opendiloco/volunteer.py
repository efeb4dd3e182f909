"""One machine's part in a run: the protocol's driver above, the worker and the outer state below.

async with connected(identity, addresses) as transport:
    run = await find_run(transport, run_id)
    async with volunteering(run, identity, transport) as volunteer:
        await volunteer.train()
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from opendiloco.checkpointing import Checkpointer
from opendiloco.config import RunConfig
from opendiloco.journal import Journal
from opendiloco.local_workload import LocalWorkload
from opendiloco.run import Run
from opendiloco.worker_process import WorkerProcess
from peers.driver import Driver
from peers.heartbeat import Heartbeat
from peers.hivemind_transport import HivemindTransport
from peers.identity import Identity
from peers.leases import SampleRange
from peers.workload import Progress, Trained

logger = logging.getLogger(__name__)

ANY_PORT = ("/ip4/0.0.0.0/tcp/0",)


class RunWorkload(LocalWorkload):
    """Trains until the run's last outer step. After that its peer stays, to hand out the finished state."""

    def __init__(self, worker: WorkerProcess, config: RunConfig) -> None:
        super().__init__(worker, config)
        self._outer_steps = config.total_outer_steps

    async def train(
        self, index: int, samples: tuple[SampleRange, ...], steps: int, on_progress: Callable[[Progress], None]
    ) -> Trained:
        if index >= self._outer_steps:
            await asyncio.Event().wait()
        return await super().train(index, samples, steps, on_progress)


class Volunteer:
    """A peer that trains. Made by `volunteering`."""

    def __init__(self, run: Run, driver: Driver, transport: HivemindTransport, workload: LocalWorkload) -> None:
        self.run = run
        self._driver = driver
        self._transport = transport
        self._workload = workload
        self._leaving = False

    @property
    def device(self) -> str:
        return self._workload.worker.device

    def record(self, journal: Journal) -> None:
        """Write every entry that is applied from now on into the journal."""
        self._driver.on_entry = journal.append

    def checkpoint_with(self, checkpointer: Checkpointer) -> None:
        """Have every state that is frozen from now on written to the disk."""
        self._driver.on_snapshot = checkpointer.take

    async def train(self) -> None:
        """Take part until `leave` is called. Raises: DilocoPeerError: what made going on impossible."""
        driving = asyncio.create_task(self._driver.run())
        failures = [
            asyncio.create_task(self._workload.worker.wait_for_death()),
            asyncio.create_task(self._transport.failure()),
        ]
        try:
            done, _ = await asyncio.wait([driving, *failures], return_when=asyncio.FIRST_COMPLETED)
            broken = [failure.result() for failure in failures if failure in done]
            if broken:
                self._driver.leave(at_once=True)  # the others need not find out by waiting
            await driving
            for error in broken:
                if not self._leaving:
                    raise error
                logger.debug("while leaving: %s", error)  # systemd, for one, ends a service's processes all at once
        finally:
            for task in (driving, *failures):
                task.cancel()
            await asyncio.gather(driving, *failures, return_exceptions=True)

    def leave(self) -> None:
        """Leave politely: a round under way is finished, then the others are told, and `train` returns."""
        self._leaving = True
        self._driver.leave()

    def heartbeats(self) -> list[Heartbeat]:
        """What is known of the live peers now, ourselves first."""
        others = self._driver.peer.membership.live(time.monotonic())
        return [self._driver.heartbeat(), *others.values()]


@asynccontextmanager
async def connected(
    identity: Identity,
    initial_peers: Sequence[str],
    listen: Sequence[str] = ANY_PORT,
    announce: Sequence[str] = (),
    client_mode: bool = False,
) -> AsyncIterator[HivemindTransport]:
    """A connection to the swarm. Raises: SwarmUnreachableError, LocalNetworkError, ManifestError."""
    transport = await HivemindTransport.create(identity, initial_peers, listen, announce, client_mode)
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def volunteering(
    run: Run, identity: Identity, transport: HivemindTransport, device: str = "auto", threads: int = 1
) -> AsyncIterator[Volunteer]:
    """A volunteer with a worker that is ready to train. Raises: DilocoPeerError when this machine does not fit."""
    async with working(run, device, threads) as workload:
        driver = Driver(identity, transport, workload, run.settings, await workload.state_digest())
        yield Volunteer(run, driver, transport, workload)


@asynccontextmanager
async def working(run: Run, device: str = "auto", threads: int = 1) -> AsyncIterator[LocalWorkload]:
    """The run's workload with a worker of its own, which ends with the context. Raises: DilocoPeerError."""
    workload = await RunWorkload.start(run.config, device, threads)
    try:
        yield workload
    finally:
        await workload.close()
