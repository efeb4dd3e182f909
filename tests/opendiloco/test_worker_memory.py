"""Workers whose device runs out of memory, played without processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from opendiloco import worker_group
from opendiloco.config import RunConfig
from opendiloco.control import Configure, Configured, Message, Train, TrainingProgress
from opendiloco.errors import DeviceMemoryError, WorkerError
from opendiloco.shared_memory import reserve
from opendiloco.worker_group import WorkerGroup, WorkersRestartedError
from opendiloco.worker_options import WorkerOptions
from opendiloco.worker_process import Descriptors, WorkerProcess
from peers.leases import SampleRange
from peers.workload import Progress
from tests.opendiloco.trainings import training_done

LEASE = (SampleRange(0, 4),)


class Played(WorkerProcess):
    """Of two workers the second can take `windows` at once; the first then waits for it in a collective."""

    windows = 0
    all: ClassVar[list[Played]] = []

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.configured: Configure
        self.ended = asyncio.Event()

    @classmethod
    async def start(cls, descriptors: Descriptors, threads: int) -> Played:
        cls.all.append(cls(descriptors.memory))
        return cls.all[-1]

    async def exchange(
        self, command: Message, answer: type[Any], on_progress: Callable[[TrainingProgress], None]
    ) -> Any:
        if isinstance(command, Configure):
            self.configured = command
            reserve(self.memory, 4)
            return Configured(
                parameters=4, tokens_per_sample=16, device="cpu", device_name="cpu", flops_per_token=100.0
            )
        assert isinstance(command, Train)
        if (self.configured.options.micro_batch or 0) <= self.windows:
            return training_done(samples=command.samples, skipped=1)
        if self.configured.rank == 0:
            await self.ended.wait()
            raise WorkerError("killed.")
        raise DeviceMemoryError("the device ran out of memory.", "Use --micro-batch.")

    async def wait_for_death(self) -> WorkerError:
        await self.ended.wait()
        return WorkerError("killed.")

    def kill(self) -> None:
        self.ended.set()

    async def close(self) -> None:
        self.kill()


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_group, "WorkerProcess", Played)
    monkeypatch.setattr(worker_group, "EXPLANATION_SECONDS", 0.01)
    yield
    Played.all.clear()


def ignore(progress: Progress) -> None:
    pass


async def started(config: RunConfig, windows: int) -> WorkerGroup:
    """Their pieces of a batch have 8 windows."""
    Played.windows = windows
    training = config.training.model_copy(update={"batch_size": 16})
    config = config.model_copy(update={"training": training})
    return await WorkerGroup.start(config, WorkerOptions(device="cpu", cpu_workers=2, micro_batch=100))


def test_the_first_time_all_start_again_with_half_the_micro_batch(
    small_config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        group = await started(small_config, windows=4)
        group.vectors.theta[:] = 7
        with pytest.raises(WorkersRestartedError):
            await group.train(0, LEASE, 4, 0, ignore)
        assert (await group.train(0, LEASE, 4, 0, ignore)).samples == LEASE
        assert [(one.configured.options.micro_batch, one.configured.fresh) for one in Played.all] == [
            *[(100, True)] * 2,
            *[(4, False)] * 2,
        ]
        assert [one.ended.is_set() for one in Played.all] == [True, True, False, False]
        assert group.vectors.theta.tolist() == [7] * 4
        assert not group._death.done()
        await group.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert "ran out of memory. The workers start again with 4 windows at once instead of 8" in caplog.text
    assert "1 inner steps were skipped" in caplog.text


def test_the_second_time_is_an_error_that_names_the_remedy(small_config: RunConfig) -> None:
    async def story() -> None:
        group = await started(small_config, windows=2)
        with pytest.raises(WorkersRestartedError):
            await group.train(0, LEASE, 4, 0, ignore)
        with pytest.raises(DeviceMemoryError) as caught:
            await group.train(0, LEASE, 4, 0, ignore)
        assert "--micro-batch" in caught.value.remedy
        assert caught.value.exit_code == 6
        assert await group.wait_for_death() is caught.value
        assert all(one.ended.is_set() for one in Played.all)
        await group.close()

    asyncio.run(story())
