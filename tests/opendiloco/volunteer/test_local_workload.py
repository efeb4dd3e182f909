"""The swarm's side of training, without a network: two workloads must agree with the one-process reference."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.model.export import RunFacts
from opendiloco.shared_memory import Vector
from opendiloco.training.outer import OuterState
from opendiloco.training.reference import Reference, Work
from opendiloco.volunteer.local_workload import LocalWorkload, TrainerWorkload
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.supervisor import WorkersRestartedError
from peers.values.chunks import digest_of_state
from peers.values.leases import SampleRange
from peers.values.workload import BadBlocksError, InnerLoop, Progress, Reduction, SnapshotError, Trained, Workload

OUTER_STEPS = [
    [Work("a", (SampleRange(0, 8),), 4), Work("b", (SampleRange(8, 16),), 4)],
    [Work("b", (SampleRange(16, 24),), 4), Work("a", (SampleRange(24, 27), SampleRange(40, 44)), 4)],
    [Work("a", (SampleRange(27, 35),), 4), Work("b", (SampleRange(44, 45),), 4)],
]
FACTS = RunFacts(run_id="small-1", manifest_digest="00" * 32, outer_steps=3, tokens=640, peers=2, held_out_loss=5.0)


def ignore(progress: Progress) -> None:
    pass


async def swarm_step(swarm: dict[str, LocalWorkload], index: int, tokens: int, roster: list[Work]) -> bytes:
    """One outer step as the swarm does it: blocks reduced in two parts, the payload applied by all."""
    members = [swarm[work.replica] for work in roster]
    trained = await asyncio.gather(
        *(
            member.run_inner_loop(InnerLoop(index, work.samples, work.steps, tokens), ignore)
            for member, work in zip(members, roster, strict=True)
        )
    )
    payloads = [await member.contribution() for member in members]
    payload = b""
    for first, last, reducer in ((0, 3, members[0]), (3, members[0].fragments[0].block_count, members[1])):
        start, stop = reducer.fragments[0].byte_range(first, last)
        blocks = [(whole[start:stop], result.tokens) for whole, result in zip(payloads, trained, strict=True)]
        for piece, _ in blocks:
            reducer.squared_norm(piece, first)
        payload += await reducer.reduce(Reduction(blocks, first))
    for member in members:
        await member.apply(payload, index)
    digests = {await member.state_digest() for member in members}
    assert len(digests) == 1
    return digests.pop()


@pytest.mark.thorough
def test_worker_processes_agree_with_the_reference_bit_for_bit(small_content: dict[str, Any], tmp_path: Path) -> None:
    """Also in the tokens that the inner schedule goes by, and the index that the outer one does."""
    schedule = {"kind": "cosine", "warmup_tokens": 400, "decay_tokens": 800}
    config = RunConfig.from_manifest_content(small_content | {"outer_steps": 3, "schedule": schedule})
    reference = Reference(config)
    expected = list(reference.run(OUTER_STEPS))

    async def story() -> None:
        names = ("a", "b")
        started = await asyncio.gather(*(WorkerGroup.start(config, WorkerOptions(device="cpu")) for _ in names))
        swarm = {name: TrainerWorkload(workers, config) for name, workers in zip(names, started, strict=True)}
        try:
            digests = [
                await swarm_step(swarm, index, tokens, roster)
                for index, (tokens, roster) in enumerate(zip((0, 256, 496), OUTER_STEPS, strict=True))
            ]
            assert digests == expected
            assert await state_of(swarm["a"]) == b"".join(reference.state.vectors)
            assert (await swarm["a"].trainer.held_out(config.evaluation)).loss == reference.held_out_loss()
            await a_snapshot_moves_the_state(swarm["a"], swarm["b"])
            await the_model_can_be_used(swarm["b"], tmp_path / "model")
        finally:
            await asyncio.gather(*(workers.close() for workers in started))

    asyncio.run(asyncio.wait_for(story(), 100))  # two workers start: twice torch and transformers


async def state_of(workload: LocalWorkload) -> bytes:
    out = bytearray(workload.state_size)
    await workload.copy_state(memoryview(out))
    return bytes(out)


async def a_snapshot_moves_the_state(donor: LocalWorkload, joiner: LocalWorkload) -> None:
    state, wanted = await state_of(donor), await donor.state_digest()
    assert digest_of_state([state]) == wanted
    zero = bytes(kernels.INT8.payload_size(joiner.trainer.vectors.theta.size))
    await joiner.apply(zero, 3)
    assert await joiner.state_digest() != wanted  # momentum alone moves theta
    before = await joiner.state_digest()
    nan = state[:-4] + b"\xff\xff\xff\xff"
    for wrong, digest in ((state[:-4], wanted), (state, before), (nan, digest_of_state([nan]))):
        with pytest.raises(SnapshotError):
            await joiner.restore(wrong, digest)
        assert await joiner.state_digest() == before
    await joiner.restore(state, wanted)
    assert await joiner.state_digest() == wanted


async def the_model_can_be_used(workload: LocalWorkload, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = await workload.trainer.generate("peers ", 12, seed=1)
    assert text == await workload.trainer.generate("peers ", 12, seed=1)
    await workload.trainer.export(folder, FACTS)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("für", add_special_tokens=False)["input_ids"] == list("für".encode())
    prompt = tokenizer("peers ", add_special_tokens=False, return_tensors="pt")
    assert len(model.generate(**prompt, max_new_tokens=3)[0]) <= 9


class StateOnly(WorkerGroup):
    """Workers that are never started: the outer state needs none."""

    def __init__(self, size: int, fragments: Sequence[slice] | None = None) -> None:
        self.fragments = fragments or [slice(0, size)]
        self.vectors = type("Vectors", (), {"theta": np.ones(size, np.float32), "local": np.zeros(size, np.float32)})()


@pytest.fixture
def workload(small_config: RunConfig) -> LocalWorkload:
    return LocalWorkload(StateOnly(10_000), small_config)


def test_it_is_a_workload_of_whole_and_ragged_blocks(workload: LocalWorkload) -> None:
    as_seen_by_peers: Workload = workload
    [whole] = as_seen_by_peers.fragments
    assert whole.block_count == 3
    assert whole.byte_range(0, 1) == (0, 4112)
    assert whole.byte_range(1, 3) == (4112, kernels.INT8.payload_size(10_000))


@pytest.mark.parametrize("first_block", [0, 1, 2])
def test_check_knows_which_blocks_are_whole(workload: LocalWorkload, first_block: int) -> None:
    payload = bytes(asyncio.run(workload.contribution()))
    start, stop = workload.fragments[0].byte_range(first_block, 3)
    workload.squared_norm(payload[start:stop], first_block)
    for wrong in (payload[start : stop - 1], payload[start:stop] + b"\0", b"\xff" * (stop - start)):
        with pytest.raises(BadBlocksError):
            workload.squared_norm(wrong, first_block)


def test_check_takes_full_blocks_from_the_middle_and_none_past_the_end(workload: LocalWorkload) -> None:
    workload.squared_norm(bytes(4112), 0)
    workload.squared_norm(bytes(2 * 4112), 0)
    for blocks, first_block in ((bytes(4112), 2), (bytes(4112), 3), (bytes(1000), 2), (bytes(10**6), 0)):
        with pytest.raises(BadBlocksError):
            workload.squared_norm(blocks, first_block)


def test_a_payload_is_applied_whole_or_not_at_all(workload: LocalWorkload, small_config: RunConfig) -> None:
    async def story() -> None:
        before = await workload.state_digest()
        payload = bytes(await workload.contribution())
        corrupt = payload[:8224] + b"\xff\xff\xff\xff" + payload[8228:]
        for wrong in (payload[:-1], b"", corrupt):
            with pytest.raises(BadBlocksError):
                await workload.apply(wrong, 0)
        assert await workload.state_digest() == before
        alone = OuterState(np.ones(10_000, np.float32), small_config.outer_optimizer)
        alone.apply(kernels.Payload(kernels.INT8, 10_000, payload), 0)
        await workload.apply(payload, 0)
        assert await workload.state_digest() == alone.digest() != before

    asyncio.run(story())


class Overtaken(StateOnly):
    """An entry is applied in the middle of its trainings."""

    meanwhile: Callable[[], Awaitable[object]]

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: Any = None,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        self.vectors.local[:] = self.vectors.theta - 1
        await self.meanwhile()
        return Trained(work.samples, 16, 1.0)


def test_work_counts_from_the_theta_that_it_began_with(small_config: RunConfig) -> None:
    async def story() -> None:
        workers = Overtaken(10_000)
        workload = LocalWorkload(workers, small_config)
        workers.vectors.local[:] = workers.vectors.theta + 2
        entry = bytes(await workload.contribution())
        workers.meanwhile = lambda: workload.apply(entry, 0, keeps_work=True)
        for _ in range(2):
            await workload.run_inner_loop(InnerLoop(0, (SampleRange(0, 1),), 1, 0), ignore)
            moved = await workload.contribution()
            one_step = kernels.Payload(kernels.INT8, 10_000)
            kernels.quantize(np.ones(10_000, np.float32), one_step)
            assert bytes(moved) == bytes(one_step)

    asyncio.run(story())


def test_no_copy_of_theta_is_held_once_the_work_is_encoded(small_config: RunConfig) -> None:
    async def story() -> None:
        workers = Overtaken(1 << 20)
        workload = LocalWorkload(workers, small_config)
        entry = bytes(await workload.contribution())
        workers.meanwhile = lambda: workload.apply(entry, 0, keeps_work=True)
        await workload.run_inner_loop(InnerLoop(0, (SampleRange(0, 1),), 1, 0), ignore)
        tracemalloc.start()
        try:
            await workload.contribution()
            await workload.apply(entry, 1, keeps_work=True)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert taken < workers.vectors.theta.nbytes / 4

    asyncio.run(story())


class ShortOfMemory(StateOnly):
    """Runs out of memory in the middle of its first training, when an entry may have been applied."""

    def __init__(self, size: int, meanwhile: Callable[[], Awaitable[object]] | None) -> None:
        super().__init__(size)
        self.meanwhile = meanwhile
        self.began_with: list[Vector] = []

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: Any = None,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        self.began_with.append((self.vectors.local if from_local else self.vectors.theta).copy())
        if len(self.began_with) == 1:
            if self.meanwhile is not None:
                await self.meanwhile()
            raise WorkersRestartedError
        return Trained(work.samples, 16, 1.0)


@pytest.mark.parametrize("applied_meanwhile", [False, True])
def test_a_training_that_ran_out_of_memory_begins_again_from_the_same_weights(
    small_config: RunConfig, applied_meanwhile: bool
) -> None:
    async def story() -> None:
        workers = ShortOfMemory(10_000, None)
        workload = LocalWorkload(workers, small_config)
        payload = bytes(await workload.contribution())
        if applied_meanwhile:
            workers.meanwhile = lambda: workload.apply(payload, 0, keeps_work=True)
        theta = workers.vectors.theta.copy()
        trained = await workload.run_inner_loop(InnerLoop(0, (SampleRange(0, 1),), 1, 0), ignore)
        assert trained.samples == (SampleRange(0, 1),)
        assert (workers.vectors.theta != theta).any() == applied_meanwhile
        assert [bool((began == theta).all()) for began in workers.began_with] == [True, True]

    asyncio.run(story())
