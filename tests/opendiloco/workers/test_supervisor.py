"""Workers that are lost, or whose device runs out of memory, in whatever they do: played without processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import DataError, DeviceError, DeviceMemoryError, MachineError, WorkerError
from opendiloco.model.export import RunFacts
from opendiloco.shared_memory import reserve
from opendiloco.stages import COMPILING, Watch
from opendiloco.workers import control, supervisor
from opendiloco.workers.control import (
    Alive,
    Configure,
    Configured,
    ControlMessage,
    EndInnerLoop,
    Evaluated,
    Exported,
    FragmentStored,
    Generated,
    InnerStepDone,
    MoveMoments,
    Report,
    RunInnerLoop,
    WorkerDeathError,
    WorkerProcess,
)
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.supervisor import LOOKS, WorkersRestartedError, _Watchdog
from opendiloco.workers.telemetry import COMPILED
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, Progress
from tests.opendiloco.workers.trainings import training_done

LEASE = (SampleRange(0, 4),)
FACTS = RunFacts(run_id="small-1", manifest_digest="00" * 32, outer_steps=3, tokens=640, peers=2, held_out_loss=5.0)
ANSWERS: dict[type[ControlMessage], ControlMessage] = {
    Evaluated: Evaluated(loss=2.0, tokens=16),
    Generated: Generated(text="peers"),
    Exported: Exported(),
}
REQUESTS: dict[str, Callable[[WorkerGroup], Awaitable[object]]] = {
    "evaluate": lambda group: group.evaluate(4),
    "generate": lambda group: group.generate("peers", 5),
    "export": lambda group: group.export(Path("model"), FACTS),
}


def quiet(stage: str, share: float | None) -> None:
    """Take a worker's word of what it is busy with."""


class Played(WorkerProcess):
    """Of two workers the second can take `windows` at once; the first then waits for it in a collective. No more than
    `uncompiled` have been tried uncompiled."""

    windows = 0
    uncompiled = 100
    all: ClassVar[list[Played]] = []
    deaths: ClassVar[dict[int, int]] = {}
    """Of requests, counted from 1 by each worker's group, which worker dies in it."""
    request: ClassVar[int] = 0
    told: ClassVar[list[ControlMessage]] = []
    """What all were told besides."""

    def __init__(self, memory: int, on_stage: Watch) -> None:
        self.memory = memory
        self.on_stage = on_stage
        self.configured: Configure
        self.ended = asyncio.Event()
        self.death = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, inherited: Sequence[int], threads: int, on_stage: Watch = quiet) -> Played:
        cls.all.append(cls(inherited[0], on_stage))
        return cls.all[-1]

    async def exchange(self, command: ControlMessage, answer: type[Any], on_report: Callable[[Report], None]) -> Any:
        if isinstance(command, Configure):
            self.configured = command
            reserve(self.memory, 4)
            return Configured(
                parameters=4,
                device="cpu",
                device_name="cpu",
                flops_per_token=100.0,
                micro_batch=min(command.options.micro_batch or 8, 8),
                uncompiled_micro_batch=min(command.options.micro_batch or 8, 8, self.uncompiled),
                held_out_digest="ab" * 32,
                bytes_per_token=1.0,
                fragments=((0, 4),),
            )
        if self.configured.rank == 0:
            Played.request += 1
        await asyncio.sleep(0)  # until all have been given it
        if self.request in self.deaths:
            if self.deaths[self.request] == self.configured.rank:
                self.kill()
            await self.ended.wait()
            raise WorkerDeathError("killed by SIGKILL.")
        if (self.configured.options.micro_batch or 0) <= self.windows:
            if not isinstance(command, RunInnerLoop):
                return ANSWERS[answer]
            on_report(FragmentStored(fragment=0, samples=command.samples, tokens=64, loss=1.0))
            await self.rest(command, on_report)
            return training_done(skipped=1)
        if self.configured.rank == 0:
            await self.ended.wait()
            raise WorkerError("killed.")
        raise DeviceMemoryError("the device ran out of memory.", "Use --micro-batch.")

    @staticmethod
    async def rest(command: RunInnerLoop, on_report: Callable[[Report], None]) -> None:
        """Take the inner steps that are left when all fragments are stored: none."""

    is_running = False

    def kill(self) -> None:
        self.ended.set()
        if not self.death.done():
            self.death.set_result(WorkerDeathError("killed by SIGKILL."))

    async def close(self) -> None:
        self.kill()


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("opendiloco.workers.supervisor.WorkerProcess", Played)
    monkeypatch.setattr("opendiloco.workers.supervisor.EXPLANATION_SECONDS", 0.01)
    monkeypatch.setattr(Played, "write", lambda self, command: Played.told.append(command))
    yield
    Played.all.clear()
    Played.deaths.clear()
    Played.told.clear()
    Played.request = 0


def ignore(progress: Progress) -> None:
    pass


async def started(config: RunConfig, windows: int, restarts: int = 0) -> WorkerGroup:
    """Their pieces of a batch have 8 windows."""
    Played.windows = windows
    config = config.changed({"training": {"batch_size": 16}})
    return await WorkerGroup.start(
        config, WorkerOptions(device="cpu", cpu_workers=2, micro_batch=100, restarts=restarts)
    )


def test_the_first_time_all_start_again_with_half_the_micro_batch(
    small_config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        group = await started(small_config, windows=4)
        group.vectors.theta[:] = 7
        with pytest.raises(WorkersRestartedError):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert (await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)).samples == LEASE
        assert [(one.configured.options.micro_batch, one.configured.fresh) for one in Played.all] == [
            *[(100, True)] * 2,
            *[(4, False)] * 2,
        ]
        assert [one.ended.is_set() for one in Played.all] == [True, True, False, False]
        assert group.vectors.theta.tolist() == [7] * 4
        assert not group.supervisor.death.done()
        await group.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert "ran out of memory. The workers start again with 4 windows at once instead of 8" in caplog.text
    assert "1 inner steps were skipped" in caplog.text


def test_who_has_tried_more_windows_goes_back_to_those_of_before_and_then_to_half(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To have tried them costs no restart, and not the one with half as many."""
    monkeypatch.setattr(Played, "uncompiled", 3)

    async def story() -> None:
        group = await started(small_config, windows=1)
        for _ in range(2):
            with pytest.raises(WorkersRestartedError):
                await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert (await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)).samples == LEASE
        assert [one.configured.options.micro_batch for one in Played.all] == [100, 100, 3, 3, 1, 1]
        await group.close()

    asyncio.run(story())


def test_workers_that_share_a_model_train_while_they_write_moments(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are given the command before the training that follows, and not in the midst of one."""
    given, exchange = list[tuple[str, int]](), Played.exchange

    async def story() -> None:
        are_written = asyncio.Event()

        async def move_moments(self: Played, command: MoveMoments) -> None:
            given.append(("moments", self.configured.rank))
            await are_written.wait()

        async def exchange_noted(self: Played, command: ControlMessage, *arguments: Any) -> Any:
            if isinstance(command, RunInnerLoop):
                given.append(("training", self.configured.rank))
            return await exchange(self, command, *arguments)

        monkeypatch.setattr(Played, "move_moments", move_moments)
        monkeypatch.setattr(Played, "exchange", exchange_noted)
        group = await started(small_config, windows=100)
        before = asyncio.create_task(group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore))
        await asyncio.sleep(0)
        kept = asyncio.create_task(group.supervisor.keep_moments(tmp_path / "moments", "run", 1))
        assert (await before).samples == LEASE
        assert (await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)).samples == LEASE
        assert not kept.done()
        are_written.set()
        await kept
        await group.close()

    asyncio.run(story())
    assert [what for what, _ in given] == ["training"] * 2 + ["moments"] * 2 + ["training"] * 2


def test_the_second_time_is_an_error_that_names_the_remedy(small_config: RunConfig) -> None:
    async def story() -> None:
        group = await started(small_config, windows=2)
        with pytest.raises(WorkersRestartedError):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        with pytest.raises(DeviceMemoryError) as caught:
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert "--micro-batch" in caught.value.remedy
        assert caught.value.exit_code == 6
        assert await group.wait_for_death() is caught.value
        assert all(one.ended.is_set() for one in Played.all)
        await group.close()

    asyncio.run(story())


def test_lost_workers_are_started_again_and_train_from_where_they_began(
    small_config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        group = await started(small_config, windows=100, restarts=2)
        Played.deaths.update({1: 0, 2: 1, 4: 1, 5: 0})
        for _ in range(2):  # each training that ends well makes up for what was lost before it
            for _ in range(2):
                with pytest.raises(WorkersRestartedError):
                    await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
            assert (await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)).samples == LEASE
        assert [one.configured.fresh for one in Played.all] == [True] * 2 + [False] * 8
        assert [one.ended.is_set() for one in Played.all] == [True] * 8 + [False] * 2
        assert not group.supervisor.death.done()
        await group.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert "killed by SIGKILL. The workers start again" in caplog.text


def test_a_failed_device_is_tried_again_and_then_named(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(command: RunInnerLoop, on_report: Callable[[Report], None]) -> None:
        raise DeviceError("cuda:0 failed: CUDA error: unspecified launch failure.", "Look at `nvidia-smi -q`.")

    async def story() -> None:
        group = await started(small_config, windows=100, restarts=1)
        monkeypatch.setattr(Played, "rest", staticmethod(fail))
        with pytest.raises(WorkersRestartedError):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        with pytest.raises(DeviceError, match="cuda:0 failed: CUDA error"):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert "nvidia-smi -q" in (await group.wait_for_death()).remedy
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


async def hang(self: Played, command: ControlMessage, answer: type[Any], on_report: Callable[[Report], None]) -> Any:
    """Take one inner step, and say nothing more."""
    on_report(step_done())
    await self.ended.wait()
    raise WorkerDeathError("was ended.")


def step_done(slowest: float = 0.001) -> InnerStepDone:
    return InnerStepDone(
        inner_step=1, loss=2.0, gradient_norm=1.0, learning_rate=0.1, tokens_per_second=9.0, slowest_seconds=slowest
    )


def test_workers_that_hang_are_started_again_like_those_that_died(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        group = await started(small_config, windows=100, restarts=2)
        exchange = Played.exchange
        monkeypatch.setattr(
            Played,
            "exchange",
            lambda self, command, *rest: (
                hang(self, command, *rest) if isinstance(command, RunInnerLoop) else exchange(self, command, *rest)
            ),
        )
        with pytest.raises(WorkersRestartedError):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert [one.ended.is_set() for one in Played.all] == [True, True, False, False]
        monkeypatch.setattr(Played, "exchange", exchange)
        assert (await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)).samples == LEASE
        assert not group.supervisor.death.done()
        await group.close()

    monkeypatch.setattr(control, "LEAST_PATIENCE", 0.05)
    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(story(), 30))
    assert "the workers have finished no inner step in 0 minutes. The workers start again" in caplog.text


def test_a_process_that_the_kernel_cannot_end_is_an_error_that_asks_for_the_machine(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in its place would wait for the same GPU."""

    async def story() -> None:
        group = await started(small_config, windows=100, restarts=2)
        Played.all[0].name = Played.all[1].name = "a worker"
        Played.deaths.update({1: 0})
        monkeypatch.setattr(Played, "is_running", True)
        with pytest.raises(MachineError, match="a GPU's driver keeps killed workers running") as caught:
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert "dmesg" in caught.value.remedy
        assert len(Played.all) == 2
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_silence_with_a_reason_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SETTING_UP", 0.01)
    looks = [0]

    async def story() -> None:
        hung = asyncio.Event()

        def is_excused() -> bool:
            looks[0] += 1
            return looks[0] <= 3 * LOOKS

        watchdog = _Watchdog(lambda seconds: hung.set(), is_excused)
        with watchdog.watching(lambda report: None):
            await hung.wait()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert looks[0] == 3 * LOOKS + LOOKS + 1


def test_a_word_of_the_workers_begins_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SETTING_UP", 0.01)
    looks, heard = [0], list[Report]()

    async def story() -> None:
        hung = asyncio.Event()

        def is_excused() -> bool:
            looks[0] += 1
            if looks[0] == LOOKS:
                hear(Alive())
            return False

        watchdog = _Watchdog(lambda seconds: hung.set(), is_excused)
        with watchdog.watching(heard.append) as hear:
            await hung.wait()

    asyncio.run(asyncio.wait_for(story(), 30))
    assert looks[0] == 2 * LOOKS
    assert heard == [Alive()]


@pytest.mark.parametrize(("slowest", "seconds"), [(None, 7200.0), (0.1, 600.0), (59.0, 600.0), (90.0, 900.0)])
def test_patience_is_long_for_the_first_inner_step_and_then_ten_of_the_slowest(
    slowest: float | None, seconds: float
) -> None:
    assert control.patience(slowest) == seconds


def test_that_workers_train_uncompiled_is_said_and_measured(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exchange, told = Played.exchange, dict[str, Any]()

    async def configured(self: Played, command: ControlMessage, answer: type[Any], on_report: Any) -> Any:
        said = await exchange(self, command, answer, on_report)
        return said.model_copy(update=told) if isinstance(said, Configured) else said

    async def story() -> None:
        for is_compiled, uncompiled in ((True, ""), (False, "there is no C compiler here; install gcc")):
            told.update(is_compiled=is_compiled, uncompiled=uncompiled)
            group = await started(small_config, windows=100)
            assert group.supervisor.uncompiled == uncompiled
            assert COMPILED._value.get() == is_compiled
            assert ("install gcc" in caplog.text) is bool(uncompiled)
            await group.close()

    monkeypatch.setattr(Played, "exchange", configured)
    asyncio.run(asyncio.wait_for(story(), 30))


async def is_restarted_once_and_then_given_up(group: WorkerGroup) -> None:
    with pytest.raises(WorkersRestartedError):
        await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
    assert "SIGKILL" in str(await group.wait_for_death())
    await group.close()


def test_one_workers_error_ends_all_since_the_others_wait_for_it(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(command: RunInnerLoop, on_report: Callable[[Report], None]) -> None:
        raise WorkerError("its data cannot be read.")

    async def story() -> None:
        group = await started(small_config, windows=100, restarts=2)
        monkeypatch.setattr(Played, "rest", staticmethod(fail))
        with pytest.raises(WorkerError, match="cannot be read"):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert "cannot be read" in str(await group.wait_for_death())
        assert all(one.ended.is_set() for one in Played.all)
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_workers_that_are_lost_too_often_are_given_up(small_config: RunConfig) -> None:
    async def story() -> None:
        group = await started(small_config, windows=100, restarts=1)
        Played.deaths.update({1: 0, 2: 0})
        await is_restarted_once_and_then_given_up(group)

    asyncio.run(story())


def test_workers_that_die_while_nobody_needs_them_are_replaced_when_somebody_does(small_config: RunConfig) -> None:
    async def story() -> None:
        group = await started(small_config, windows=100, restarts=1)
        Played.all[1].kill()
        await Played.all[0].ended.wait()  # the group kills the other
        assert not group.supervisor.death.done()
        assert (await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)).samples == LEASE
        assert len(Played.all) == 4
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


@pytest.mark.parametrize("request_kind", REQUESTS)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_death_in_any_request_is_no_more_than_a_restart(
    small_config: RunConfig, request_kind: str, dying: int
) -> None:
    """It is asked again, from new workers; and counts with those of trainings, until one has ended well."""
    asked = 1 if request_kind == "evaluate" else 0  # the others are the first worker's alone

    async def story() -> None:
        group = await started(small_config, windows=100, restarts=2)
        Played.deaths.update({1: min(dying, asked), 3: 0, 4: 0})
        await REQUESTS[request_kind](group)
        assert [one.configured.fresh for one in Played.all] == [True] * 2 + [False] * 2
        await is_restarted_once_and_then_given_up(group)

    asyncio.run(asyncio.wait_for(story(), 30))


@pytest.mark.parametrize("request_kind", REQUESTS)
def test_deaths_in_one_request_are_counted_and_too_many_are_an_error(
    small_config: RunConfig, request_kind: str
) -> None:
    async def story() -> None:
        group = await started(small_config, windows=100, restarts=2)
        Played.deaths.update({1: 0, 2: 0, 3: 0})
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            await REQUESTS[request_kind](group)
        assert len(Played.all) == 6
        assert "SIGKILL" in str(await group.wait_for_death())
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_evaluation_that_runs_out_of_memory_is_done_again_with_half_as_many_windows(small_config: RunConfig) -> None:
    async def story() -> None:
        group = await started(small_config, windows=4)
        assert (await group.evaluate(16)).loss == 2.0
        assert [one.configured.options.micro_batch for one in Played.all] == [100, 100, 4, 4]
        assert not group.supervisor.death.done()
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_workers_that_die_while_they_start_are_started_again(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        group = await started(small_config, windows=100, restarts=3)
        Played.deaths.update({1: 1})
        start, failures = Played.start, iter((True, True, False, False))

        async def fail(*arguments: Any) -> Played:
            if next(failures):
                raise WorkerDeathError("killed by SIGKILL while it started.")
            return await start(*arguments)

        monkeypatch.setattr(Played, "start", fail)
        with pytest.raises(WorkersRestartedError):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert len(Played.all) == 4
        await group.close()

    asyncio.run(asyncio.wait_for(story(), 30))


@pytest.mark.parametrize(
    ("failures", "restarts", "survives"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False)]
)
def test_memory_that_runs_out_while_workers_start_again_is_not_the_end(
    small_config: RunConfig, failures: int, restarts: int, survives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once half as many windows are tried instead; after that it counts as any other lost start."""
    left = [0]
    exchange = Played.exchange

    async def configure(self: Played, command: ControlMessage, answer: type[Any], on_progress: Any) -> Any:
        if isinstance(command, Configure) and command.rank == 0 and left[0]:
            left[0] -= 1
            raise DeviceMemoryError("the device ran out of memory.", "Use --micro-batch.")
        return await exchange(self, command, answer, on_progress)

    async def story() -> None:
        group = await started(small_config, windows=100, restarts=restarts)
        Played.deaths.update({1: 1})
        left[0] = failures
        with pytest.raises(WorkersRestartedError if survives else DeviceMemoryError):
            await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert group.supervisor.death.done() != survives
        assert Played.all[-1].configured.options.micro_batch == 4
        await group.close()

    monkeypatch.setattr(Played, "exchange", configure)
    asyncio.run(asyncio.wait_for(story(), 30))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_compiler_that_hangs_on_one_worker_keeps_the_others_waiting_for_a_while_only(
    fresh: bool, small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All start again without it, whether they have just come or take the place of lost ones; that is no restart."""
    hangs = [fresh]
    exchange = Played.exchange

    async def compile_for_ever(self: Played, command: ControlMessage, answer: type[Any], on_progress: Any) -> Any:
        if hangs[0] and isinstance(command, Configure) and command.options.compile is not False:
            if command.rank == 1:
                self.on_stage("building the model", None)
                self.on_stage(COMPILING, None)
            await self.ended.wait()
            raise WorkerDeathError("killed by SIGKILL.")
        return await exchange(self, command, answer, on_progress)

    async def story() -> None:
        group = await started(small_config, windows=100, restarts=0 if fresh else 1)
        if not fresh:
            Played.deaths.update({1: 1})
            hangs[0] = True
            with pytest.raises(WorkersRestartedError):
                await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
            assert len(Played.all) == 6
        assert not group.supervisor.death.done()
        assert [one.configured.options.compile for one in Played.all[-2:]] == [False, False]
        assert [one.configured.fresh for one in Played.all[-2:]] == [False, False], "theta is there"
        assert group.supervisor.uncompiled == "the compiler did not finish in 0 minutes."
        await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        await group.close()

    monkeypatch.setattr(Played, "exchange", compile_for_ever)
    monkeypatch.setattr(supervisor, "COMPILING_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(story(), 30))
    said = "a worker's compiler did not finish in 0 minutes. The workers start again without compiling"
    assert caplog.text.count(said) == 1


def test_a_compiler_that_comes_to_an_end_is_not_timed_any_more(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Played.exchange

    async def compile_first(self: Played, command: ControlMessage, answer: type[Any], on_progress: Any) -> Any:
        if isinstance(command, Configure):
            self.on_stage(COMPILING, None)
        return await exchange(self, command, answer, on_progress)

    async def story() -> None:
        group = await started(small_config, windows=100)
        loop: Any = asyncio.get_running_loop()
        due = [timer.when() - loop.time() for timer in loop._scheduled if not timer.cancelled()]
        assert not [seconds for seconds in due if seconds > 1000], "the compiler's timer is gone"
        await group.run_inner_loop(InnerLoop(0, LEASE, 4, 0), ignore)
        assert len(Played.all) == 2, "nobody was started again"
        await group.close()

    monkeypatch.setattr(Played, "exchange", compile_first)
    monkeypatch.setattr(supervisor, "COMPILING_SECONDS", 3600.0)
    asyncio.run(asyncio.wait_for(story(), 60))


# What is left to be trained when all fragments are stored --------------------------------------------------------
class Rest:
    """Inner steps of the first training that end when `may_end` is set, or as `error` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.may_end = asyncio.Event()
        self._error = error
        monkeypatch.setattr(Played, "rest", staticmethod(self._take))

    def report(self, inner_step: int) -> None:
        """Have the first worker report one of them."""
        self._on_report(
            InnerStepDone(
                inner_step=inner_step, loss=1.0, gradient_norm=1.0, learning_rate=1.0, tokens_per_second=100.0
            )
        )

    async def _take(self, command: RunInnerLoop, on_report: Callable[[Report], None]) -> None:
        if command.number == 1:
            self._on_report = on_report
            await self.may_end.wait()
            if self._error is not None:
                raise self._error


async def started_with_overlap(config: RunConfig, restarts: int = 0) -> WorkerGroup:
    return await started(config.changed({"streaming": {"overlap": 2}}), 100, restarts)


FIRST, SECOND = InnerLoop(0, LEASE, 4, 0), InnerLoop(1, LEASE, 4, 64)


def test_what_is_trained_is_known_before_the_last_inner_steps(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the workers are asked next waits for these."""

    async def story() -> None:
        group, rest = await started_with_overlap(small_config), Rest(monkeypatch)
        seen = list[int]()
        trained = await group.run_inner_loop(FIRST, lambda progress: seen.append(progress.inner_step))
        rest.report(5)
        assert seen == [0], "it tells of the speed, and is no step of the next lease"
        assert (trained.samples, trained.tokens) == (LEASE, 64)
        evaluation = asyncio.create_task(group.evaluate(4))
        second = asyncio.create_task(group.run_inner_loop(SECOND, ignore, goes_on=True))
        await asyncio.sleep(0)
        assert "trained after outer step 0" not in caplog.text
        assert not Played.told
        rest.may_end.set()
        assert (await second).samples == LEASE
        assert evaluation.done()
        await group.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(story())
    assert "trained after outer step 0" in caplog.text


def test_a_training_that_begins_anew_has_workers_leave_what_is_left(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        group, rest = await started_with_overlap(small_config), Rest(monkeypatch)
        await group.run_inner_loop(FIRST, ignore)
        second = asyncio.create_task(group.run_inner_loop(SECOND, ignore))
        await asyncio.sleep(0)
        assert Played.told == [EndInnerLoop(number=1)] * 2
        rest.may_end.set()
        await second
        await group.close()

    asyncio.run(story())


def test_what_goes_wrong_with_the_last_inner_steps_is_raised_by_the_next_training(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on from them. One that begins anew has nothing to do with them."""

    async def story(goes_on: bool) -> None:
        group = await started_with_overlap(small_config)
        rest = Rest(monkeypatch, DataError("a document cannot be read.", ""))
        monkeypatch.setattr(group.supervisor, "_die", lambda error: None)
        await group.run_inner_loop(FIRST, ignore)
        rest.may_end.set()
        if goes_on:
            with pytest.raises(DataError, match="cannot be read"):
                await group.run_inner_loop(SECOND, ignore, goes_on=True)
            assert (
                "in the training after outer step 0, the inner steps after the last capture failed, and their work is "
                "lost: a document cannot be read." in caplog.text
            )
        else:
            await group.run_inner_loop(SECOND, ignore)
        await group.close()

    asyncio.run(story(True))
    asyncio.run(story(False))


def test_workers_that_are_lost_in_their_last_inner_steps_do_not_go_on(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        group = await started_with_overlap(small_config, restarts=1)
        rest = Rest(monkeypatch, WorkerDeathError("killed by SIGKILL."))
        await group.run_inner_loop(FIRST, ignore)
        rest.may_end.set()
        with pytest.raises(WorkersRestartedError):
            await group.run_inner_loop(SECOND, ignore, goes_on=True)
        assert (await group.run_inner_loop(SECOND, ignore, from_local=True)).samples == LEASE
        await group.close()

    asyncio.run(story())
