"""How workers on several machines are commanded; here without processes: workers and nodes are played."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import IslandError
from opendiloco.inner.moments_file import header_of
from opendiloco.model.layout import Parameter
from opendiloco.workers.control import (
    Configured,
    ControlMessage,
    DevicesCounted,
    InnerLoopDone,
    InnerStepDone,
    LeaseDigested,
    LocateMoments,
    MomentsMoved,
    MoveMoments,
    RunInnerLoop,
)
from opendiloco.workers.crew import Crew
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.handle import Answer, WorkerHandle
from opendiloco.workers.moments import WorkersMoments
from opendiloco.workers.nodes import Node, Nodes, Parts, Region
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.process import Inherited, WorkerProcess
from opendiloco.workers.request_queue import RequestQueue
from peers.values.leases import SampleRange
from peers.values.workload import SnapshotError


class PlayedWorker(WorkerHandle):
    """A worker that answers each command with one of `answers`, and moves moments without a word."""

    def __init__(self, node: Node | None = None, answers: tuple[ControlMessage, ...] = ()) -> None:
        super().__init__()
        self.node = node
        self._answers = iter(answers)

    def write(self, message: ControlMessage) -> None:
        pass

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_progress: Callable[[InnerStepDone], None]
    ) -> Answer:
        answered = next(self._answers)
        assert isinstance(answered, answer)
        return answered

    async def move_moments(self, command: MoveMoments) -> MomentsMoved:
        return MomentsMoved()


class PlayedNode:
    """A machine that takes everything, and has the workers that it is given."""

    def __init__(self, name: str, answers: tuple[ControlMessage, ...] = ()) -> None:
        self.name = name
        self.cores = 1
        self.others_steps = 0
        self._answers = answers

    async def start_worker(self, threads: int) -> WorkerHandle:
        return PlayedWorker(self, self._answers)

    async def resize(self, region: Region, size: int) -> None:
        pass

    async def send(self, region: Region, data: memoryview, part: tuple[int, int], keeps: bool = False) -> None:
        pass

    async def sent(self) -> None:
        pass

    async def fetch(self, region: Region, data: memoryview, parts: Parts) -> None:
        pass


@pytest.mark.parametrize(("machines", "content"), [(1, None), (2, None), (2, b"")])
def test_a_file_of_moments_that_is_missing_or_empty_is_no_snapshot(
    machines: int, content: bytes | None, tmp_path: Path
) -> None:
    """Whoever asks takes that for moments that are lost, and begins anew."""
    path = tmp_path / "moments.safetensors"
    if content is not None:
        path.write_bytes(content)

    async def recall() -> None:
        workers = [PlayedWorker(), *(PlayedWorker(PlayedNode(f"node {rank}")) for rank in range(1, machines))]
        moments = WorkersMoments(-1, RequestQueue(), lambda: workers, lambda: False)
        await moments.recall_at_once(path, "run-1")

    with pytest.raises(SnapshotError, match="the file with the moments cannot be used"):
        asyncio.run(recall())


DEFAULTS = WorkerOptions()


class ReadingWorker(PlayedWorker):
    """A worker that wants `part` of the moments, and sees what its machine has when it is told to read them."""

    node: ReadingNode

    def __init__(self, node: ReadingNode, part: tuple[int, int]) -> None:
        super().__init__(node)
        self._part = part

    async def move_moments(self, command: MoveMoments) -> MomentsMoved:
        await asyncio.sleep(0)  # others may have their turn
        if isinstance(command, LocateMoments):
            self.node.header = bytes(self.node.memory)
            return MomentsMoved(parts=(self._part,))
        self.node.read.append(bytes(self.node.memory))
        return MomentsMoved()


class ReadingNode(PlayedNode):
    """A machine that has what it was sent, and dots elsewhere."""

    memory = bytearray()
    header = b""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.read = list[bytes]()

    async def resize(self, region: Region, size: int) -> None:
        self.memory = bytearray(b"." * size)

    async def send(self, region: Region, data: memoryview, part: tuple[int, int], keeps: bool = False) -> None:
        self.memory[slice(*part)] = data[slice(*part)]


def test_workers_of_other_machines_read_their_parts_of_moments_one_after_the_other(tmp_path: Path) -> None:
    """So that no machine has more of them at once than what one worker reads."""
    header = header_of([Parameter("a/exp_avg", (4,), 0)], {})
    path, start = tmp_path / "moments.safetensors", len(header)
    path.write_bytes(header + bytes(range(65, 81)))
    path.chmod(0o400)
    first, second = ReadingNode("node 1"), ReadingNode("node 2")
    parts = {first: [(start, start + 4), (start + 4, start + 8)], second: [(start + 8, start + 16)]}

    async def recall() -> None:
        workers = [PlayedWorker(), *(ReadingWorker(node, part) for node, wanted in parts.items() for part in wanted)]
        await WorkersMoments(-1, RequestQueue(), lambda: workers, lambda: False).recall_at_once(path, "run-1")

    asyncio.run(recall())
    assert first.header == second.header == header + b"." * 16
    assert [seen[start:] for seen in first.read] == [b"ABCD............", b"....EFGH........"]
    assert [seen[start:] for seen in second.read] == [b"........IJKLMNOP"]
    assert not first.memory
    assert not second.memory


async def crew_of(*gpus: int, monkeypatch: pytest.MonkeyPatch, options: WorkerOptions = DEFAULTS) -> Crew:
    """Start one on machines with so many GPUs each."""
    here, *there = [PlayedNode(f"node {rank}", (DevicesCounted(gpus=count),)) for rank, count in enumerate(gpus)]

    async def start_here(descriptors: Inherited, threads: int) -> WorkerHandle:
        worker = await here.start_worker(threads)
        worker.node = None
        return worker

    monkeypatch.setattr(WorkerProcess, "start", start_here)
    crew = Crew(Inherited(-1, -1), Nodes(there), lambda: True)
    await crew.start(options)
    return crew


def test_machines_may_have_different_numbers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> str:
        return (await crew_of(1, 2, monkeypatch=monkeypatch)).device

    assert asyncio.run(start()) == "3 x cuda on 2 machines"


def test_a_machine_without_gpus_beside_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would meet the others in no collective, and all would wait until those give up."""
    with pytest.raises(IslandError, match="node 2 trains on cpu, node 0 on cuda") as caught:
        asyncio.run(crew_of(2, 2, 0, monkeypatch=monkeypatch))
    assert "--device cpu" in caught.value.remedy


@pytest.mark.parametrize(("gpus", "given", "computing"), [(0, None, 1), (1, None, 1), (0, 3, 3), (1, 3, 3)])
def test_workers_hear_their_threads_and_what_their_owner_says_of_them(
    gpus: int, given: int | None, computing: int, small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is said, the initial weights are drawn by more threads than a worker trains with."""

    async def told() -> tuple[int, int | None]:
        options = WorkerOptions(threads=given)
        crew = await crew_of(gpus, gpus, monkeypatch=monkeypatch, options=options)
        command = crew.commands(small_config, options, fresh=True)[1]
        return command.threads, command.options.threads

    monkeypatch.setattr("opendiloco.workers.crew.usable_cores", lambda: 1)
    assert asyncio.run(told()) == (computing, given)


CONFIGURED = Configured(
    parameters=10,
    tokens_per_sample=16,
    device="cpu",
    device_name="cpu",
    flops_per_token=None,
    micro_batch=4,
    text_digest="ab",
    held_out_digest="ab",
    bytes_per_token=1.0,
    fragments=((0, 10),),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters", 11),
        ("tokens_per_sample", 8),
        ("text_digest", "cd"),
        ("held_out_digest", "cd"),
        ("bytes_per_token", 2),
    ],
)
def test_a_machine_that_makes_something_else_of_the_run_is_named(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(other: Configured) -> None:
        crew = await crew_of(0, 0, monkeypatch=monkeypatch)
        crew.check_alike([CONFIGURED, other])

    asyncio.run(check(CONFIGURED.model_copy(update={"micro_batch": 2})))
    with pytest.raises(IslandError, match=f"node 1 has {name} = {value}, node 0 has "):
        asyncio.run(check(CONFIGURED.model_copy(update={name: value})))


def test_a_machine_that_would_train_on_other_text_ends_the_volunteer_before_it_trains(small_config: RunConfig) -> None:
    """Of a source with shards the text is read only now."""
    lease = (SampleRange(0, 8),)

    async def story() -> None:
        node = PlayedNode("node 1")
        group = WorkerGroup(small_config, WorkerOptions(), Nodes([node]))
        answers = [LeaseDigested(lease_digest="ab"), LeaseDigested(lease_digest="cd")]
        group._crew.workers = [PlayedWorker(None, (answers[0],)), PlayedWorker(node, (answers[1],))]
        command = RunInnerLoop(number=1, index=0, samples=lease, steps=4, tokens=0)
        with pytest.raises(IslandError, match="node 1 has lease_digest = cd, node 0 has ab") as caught:
            await group._ask(command, InnerLoopDone)
        assert caught.value.exit_code == 15
        assert "same data" in caught.value.remedy
        assert await group.wait_for_death() is caught.value
        await group.close()

    asyncio.run(story())


@pytest.mark.parametrize(("index", "is_refused"), [(0, True), (39, True), (40, False), (55, False)])
def test_a_volunteer_trains_no_outer_step_that_another_of_its_machines_has_on_its_disk(
    index: int, is_refused: bool, small_config: RunConfig
) -> None:
    """torchrun has made another machine the first one, and nobody else in the run has the state either."""

    async def story() -> None:
        node = PlayedNode("node 1")
        node.others_steps = 40
        group = WorkerGroup(small_config, WorkerOptions(), Nodes([node]))
        group._crew.workers = [PlayedWorker(None, (LeaseDigested(lease_digest=""),))]
        command = RunInnerLoop(number=1, index=index, samples=(SampleRange(0, 8),), steps=4, tokens=0)
        said = f"node 1 has this run's state after outer step 40 on its disk; here, .* after outer step {index}"
        with pytest.raises(IslandError, match=said) if is_refused else pytest.raises(AttributeError, match="vectors"):
            await group._ask(command, InnerLoopDone)
        await group.close()

    asyncio.run(story())
