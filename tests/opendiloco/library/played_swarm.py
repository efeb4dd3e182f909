"""A swarm of one peer, whose training is a loop of one's own: no network, and its payloads are the averages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ClassVar

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.library import loop as loop_module
from opendiloco.library.swarm import Joined, SwarmThread
from opendiloco.run import Run
from opendiloco.volunteer.local_workload import TrainerWorkload
from peers.values.identity import Identity
from peers.values.leases import SampleRange, sample_count
from peers.values.manifest import Invite
from peers.values.workload import InnerLoop, Progress, Reduction, Trained

Lease = tuple[SampleRange, ...]


class PlayedSwarm(SwarmThread):
    """Grants leases, one for each outer step, and takes what was trained on them."""

    run_of_it: Run
    leases: Sequence[Lease]
    swarms: ClassVar[list[PlayedSwarm]]
    fails_at: ClassVar[int | None] = None
    """The outer step at which the network is gone."""

    async def _take_part(self) -> None:
        self.swarms.append(self)
        self.trained = list[Trained]()
        self.progress = list[Progress]()
        self.digests = list[bytes]()
        self.left = asyncio.Event()
        run = self.run_of_it
        worker = await asyncio.to_thread(self.worker_of, run)
        self.workload = TrainerWorkload(worker, run.config, run_is_over=worker.run_is_over)
        call = asyncio.get_running_loop().call_soon_threadsafe

        def leave() -> None:
            with suppress(RuntimeError):  # it has ended
                call(self.left.set)

        self.joined.set_result(Joined(run, worker, leave))
        training = asyncio.create_task(self._train())
        leaving = asyncio.create_task(self.left.wait())
        await asyncio.wait([training, leaving], return_when=asyncio.FIRST_COMPLETED)
        training.cancel()
        leaving.cancel()
        await asyncio.wait([training])
        if not training.cancelled():
            training.result()

    async def _train(self) -> None:
        steps, tokens = self.run_of_it.config.training.inner_steps, 0
        last = len(self.workload.fragments) - 1
        for index, lease in enumerate(self.leases):

            async def captured(fragment: int, index: int = index) -> None:
                await self._take(index, fragment)

            if index == self.fails_at:
                raise RuntimeError("the network is gone")
            work = InnerLoop(index, lease, steps, tokens)
            trained = await self.workload.run_inner_loop(work, self.progress.append, captured)
            self.trained.append(trained)
            tokens += trained.tokens
            await self._take(index, last)
            self.digests.append(await self.workload.state_digest())
        await self.workload.run_inner_loop(InnerLoop(len(self.leases), (), steps, tokens), self.progress.append)

    async def _take(self, index: int, fragment: int) -> None:
        payload = bytes(await self.workload.contribution(fragment))
        weight = self.run_of_it.config.training.sequence_length * sample_count(self.leases[index])
        reduction = Reduction([(payload, weight)], 0, fragment=fragment, index=index)
        average = bytes(await self.workload.reduce(reduction))
        keeps_work = fragment < len(self.workload.fragments) - 1
        await self.workload.apply(average, index, fragment, keeps_work=keeps_work)


@contextmanager
def playing(config: RunConfig, leases: Sequence[Lease]) -> Iterator[type[PlayedSwarm]]:
    """Have loops join such a swarm: a run with as many outer steps as there are leases."""

    class Played(PlayedSwarm):
        run_of_it = Run.sign(config, Identity.generate())
        swarms: ClassVar[list[PlayedSwarm]] = []

    Played.leases = leases
    assert config.total_outer_steps == len(leases)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_module, "SwarmThread", Played)
        patch.setattr(Invite, "parse", lambda text: Invite("small-1", ()))
        yield Played
