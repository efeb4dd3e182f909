"""Workers that stream, and the state beside them: driven by hand, they must agree with the reference bit for bit."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import WorkerError
from opendiloco.shared_memory import Vector
from opendiloco.training.reference import Reference, Work
from opendiloco.volunteer.local_workload import LocalWorkload
from opendiloco.workers.control import InnerLoopDone, RunInnerLoop
from opendiloco.workers.supervisor import WorkersRestartedError
from peers.values.leases import SampleRange
from peers.values.workload import InnerLoop, OnCaptured, Progress, Reduction, Trained, captures_nothing
from tests.opendiloco.volunteer.threaded_workers import ThreadedWorkers

SECONDS = 60.0  # for what takes seconds


def streaming_config(
    small_content: dict[str, Any], codec: str, streaming: dict[str, Any], inner_steps: int = 4
) -> RunConfig:
    kind, *more = codec.split()
    content = copy.deepcopy(small_content) | {"streaming": streaming}
    content["codec"] = {"kind": kind, "rounding": "stochastic" if "stochastic" in more else "nearest"}
    content["codec"]["error_feedback"] = 0.9 if "feedback" in more else 0.0
    content["model"]["config"]["num_hidden_layers"] = 4
    content["training"] = content["training"] | {"inner_steps": inner_steps}
    return RunConfig.from_manifest_content(content)


def work(replica: str, first: int, count: int = 8) -> Work:
    return Work(replica, (SampleRange(first, first + count),), 4)


ROSTERS = (
    (work("a", 0), work("b", 8)),
    (work("b", 16, 5), work("a", 24)),  # one takes fewer inner steps
    (work("a", 32, 1),),  # fewer than there are fragments
    (work("b", 40), work("a", 48)),  # the one that was away begins with theta
    (work("a", 56), work("b", 64, 7)),
)


@dataclass
class ByHand:
    """The part of the swarm: it averages what workloads give it, and hands it out when it likes."""

    swarm: dict[str, LocalWorkload]
    draw: random.Random
    tokens: int = 0
    index: int = 0

    async def outer_step(self, roster: Sequence[Work]) -> bytes:
        """Take all outer steps of a cycle. Return the digest of the state after it."""
        last = len(self.swarm["a"].fragments) - 1
        self.given: dict[int, dict[str, bytes]] = {fragment: {} for fragment in range(last + 1)}
        self.applying = list[asyncio.Task[None]]()
        trained = await asyncio.gather(*(self.train(each, roster) for each in roster))
        for each in roster:
            await self.take(each, roster, last)
        await asyncio.gather(*self.applying)
        digests = {await workload.state_digest() for workload in self.swarm.values()}
        assert len(digests) == 1
        self.index += 1
        self.tokens += sum(each.tokens for each in trained)
        return digests.pop()

    async def train(self, each: Work, roster: Sequence[Work]) -> Trained:
        async def on_captured(fragment: int) -> None:
            await self.take(each, roster, fragment)

        workload, [given] = self.swarm[each.replica], each.samples
        count = given.stop - given.start
        steps = min(each.steps, count // 2)  # of two samples each; of a lease of which the rest is not trained
        lease = SampleRange(given.start, given.stop + 3) if count == 2 * steps else given
        inner_loop = InnerLoop(self.index, (lease,), steps if lease != given else each.steps, self.tokens)
        return await workload.run_inner_loop(inner_loop, ignore, on_captured)

    async def take(self, each: Work, roster: Sequence[Work], fragment: int) -> None:
        """Take a contribution; with the last one the average is handed out, sooner or later."""
        self.given[fragment][each.replica] = bytes(await self.swarm[each.replica].contribution(fragment))
        if len(self.given[fragment]) == len(roster):
            self.applying.append(asyncio.create_task(self.conclude(fragment, roster)))

    async def conclude(self, fragment: int, roster: Sequence[Work]) -> None:
        weighted = [(self.given[fragment][each.replica], float(self.tokens_of(each))) for each in roster]
        payload = bytes(await self.swarm["a"].reduce(Reduction(weighted, 0, fragment=fragment, index=self.index)))
        is_last = fragment == len(self.given) - 1
        for name in self.draw.sample(list(self.swarm), len(self.swarm)):
            for _ in range(self.draw.choice((0, 1, 30))):
                await asyncio.sleep(0.001)  # no wait for anything: workers come first here, and there last
            counts = name in self.given[fragment]
            await self.swarm[name].apply(payload, self.index, fragment, keeps_work=not is_last, counts=counts)

    @staticmethod
    def tokens_of(each: Work) -> int:
        return 16 * sum(samples.stop - samples.start for samples in each.samples)


def ignore(progress: Progress) -> None:
    pass


async def by_hand(config: RunConfig, swarm: dict[str, LocalWorkload], rosters: Sequence[Sequence[Work]]) -> list[bytes]:
    """The state digest after each outer step. Evaluating theta in between changes nothing."""
    hand, digests = ByHand(swarm, random.Random(repr(config))), list[bytes]()
    for roster in rosters:
        digests.append(await hand.outer_step(roster))
        if hand.index % 2:
            await asyncio.gather(*(workload.trainer.held_out(config.evaluation) for workload in swarm.values()))
    return digests


CASES = [
    # layers a fragment, where embeddings are, tau, alpha, codec
    (1, "apart", 1, 0.5, "e3m0"),  # 5
    (2, "ends", 3, 0.0, "uint4"),
    (2, "apart", 2, 0.5, "e3m0 stochastic"),
    (4, "ends", 0, 0.0, "sparse feedback"),
    (4, "ends", 0, 0.0, "uint4 stochastic feedback"),
]
MORE_CASES = [
    (1, "ends", 0, 0.0, "int8"),  # 4 fragments
    (4, "ends", 2, 0.5, "e3m0"),  # 1
    (1, "ends", 3, 0.3, "int8"),
    (2, "apart", 0, 0.0, "e3m0"),
    (2, "apart", 1, 0.5, "int8"),
    (4, "ends", 0, 0.5, "int8"),
    (4, "ends", 0, 0.0, "int8 stochastic"),
    (2, "apart", 2, 0.5, "e3m0 feedback"),
    (2, "apart", 2, 0.5, "sparse feedback"),
]


@pytest.mark.parametrize(
    ("layers", "embeddings", "overlap", "alpha", "codec"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.thorough) for each in MORE_CASES)],
)
def test_workloads_agree_with_the_reference(
    small_content: dict[str, Any], layers: int, embeddings: str, overlap: int, alpha: float, codec: str
) -> None:
    streaming = {"layers_per_fragment": layers, "embeddings": embeddings, "overlap": overlap, "alpha": alpha}
    config = streaming_config(small_content, codec, streaming, 5 if embeddings == "apart" else 4)
    expected = list(Reference(config).run(ROSTERS))

    async def story() -> None:
        swarm = {name: LocalWorkload(ThreadedWorkers(config), config) for name in "ab"}
        assert await by_hand(config, swarm, ROSTERS) == expected

    asyncio.run(asyncio.wait_for(story(), SECONDS))


@pytest.mark.parametrize("own", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_a_machine_with_an_overlap_of_its_own_agrees_with_the_reference(
    small_content: dict[str, Any], own: int
) -> None:
    """The paper's experiment with slack between workers, section 3.3.2."""
    config = streaming_config(small_content, "int8", {"layers_per_fragment": 1, "overlap": 2}, 5)
    rosters = [[replace(each, overlap=own) if each.replica == "b" else each for each in roster] for roster in ROSTERS]
    expected = list(Reference(config).run(rosters))
    assert expected[-1] != list(Reference(config).run(ROSTERS))[-1]

    async def story() -> None:
        swarm = {"a": LocalWorkload(ThreadedWorkers(config), config)}
        swarm["b"] = LocalWorkload(ThreadedWorkers(config, own), config)
        assert await by_hand(config, swarm, ROSTERS) == expected

    asyncio.run(asyncio.wait_for(story(), SECONDS))


# What may become of a fragment ---------------------------------------------------------------------------------------
@pytest.fixture
def config(small_content: dict[str, Any]) -> RunConfig:
    """Two fragments of blocks and one of embeddings, after 2, 3 and 4 inner steps; everybody waits."""
    return streaming_config(small_content, "int8", {"layers_per_fragment": 2})


def tell(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), SECONDS))


LEASE = InnerLoop(0, (SampleRange(0, 8),), 4, 0)
NEXT = InnerLoop(1, (SampleRange(8, 16),), 4, 128)


def encoded(theta: Vector, local: Vector) -> bytes:
    payload = kernels.Payload(kernels.INT8, theta.size)
    kernels.quantize_difference(theta, local, payload)
    return bytes(payload.buffer)


async def step_from(workload: LocalWorkload, fragment: int, value: float, index: int = 0) -> None:
    """An outer step that others have made."""
    part = workload.trainer.fragments[fragment]
    difference = np.full(part.stop - part.start, value, np.float32)
    await workload.apply(encoded(difference, np.zeros_like(difference)), index, fragment, keeps_work=True)


def present_weights(workload: LocalWorkload) -> Vector:
    weights = np.zeros_like(workload.trainer.vectors.theta)
    assert isinstance(workload.trainer, ThreadedWorkers)
    workload.trainer.replica.store(weights)
    return weights


async def leave(workload: LocalWorkload, index: int, fragment: int) -> None:
    """Take a fragment's contribution, and leave its theta as it is."""
    await workload.contribution(fragment)
    await workload.unchanged(index, fragment)


def test_of_what_nobody_had_trained_workers_keep_what_they_have(config: RunConfig) -> None:
    """They end where they would have been alone, and all that they have learned counts in the next cycle."""

    async def story() -> None:
        workload = LocalWorkload(ThreadedWorkers(config), config)
        theta = workload.trainer.vectors.theta.copy()
        alone = ThreadedWorkers(config)
        await workload.run_inner_loop(LEASE, ignore, partial(leave, workload, 0))
        await leave(workload, 0, 2)
        await workload.run_inner_loop(NEXT, ignore, partial(leave, workload, 1))
        alone.replica.train(theta, 0, LEASE.samples, 4)
        for _ in alone.replica.inner_steps(None, 1, NEXT.samples, 4):
            pass
        local = np.zeros_like(theta)
        alone.replica.store(local)
        assert np.array_equal(present_weights(workload), local)
        last = workload.trainer.fragments[2]
        assert bytes(await workload.contribution(2)) == encoded(theta[last], local[last])

    tell(story)


@pytest.mark.parametrize("is_on_its_way", [True, False])
def test_work_that_goes_on_counts_from_the_theta_that_it_began_with(config: RunConfig, is_on_its_way: bool) -> None:
    """Regression: where others' entry came after workers were told to go on, its outer step was taken back: by what was
    encoded next, which counted from the new theta. The entry is of the same cycle if its payload was `on its way`."""

    async def story() -> None:
        workload, steps = LocalWorkload(ThreadedWorkers(config), config), list[asyncio.Task[None]]()
        part = workload.trainer.fragments[0]
        began_with = workload.trainer.vectors.theta[part].copy()

        async def on_captured(fragment: int) -> None:
            await leave(workload, 0, fragment)
            if fragment == 0 and is_on_its_way:
                await step_from(workload, 0, 0.25)

        def overtake(progress: Progress) -> None:
            if not steps and not is_on_its_way:
                steps.append(asyncio.create_task(step_from(workload, 0, 0.25, index=1)))

        async def on_captured_next(fragment: int) -> None:
            await asyncio.gather(*steps)
            local = workload.trainer.vectors.local[part].copy()
            contribution = bytes(await workload.contribution(fragment))
            if fragment == 0:
                assert contribution == encoded(began_with, local)
            await workload.unchanged(1, fragment)

        await workload.run_inner_loop(LEASE, ignore, on_captured)
        await leave(workload, 0, 2)
        await workload.run_inner_loop(NEXT, overtake, on_captured_next)

    tell(story)


def test_an_entry_that_comes_before_workers_have_loaded_theta_changes_no_base(config: RunConfig) -> None:
    """Regression: they loaded the new theta, and what they had learned counted from the old one."""

    async def story() -> None:
        workers = ThreadedWorkers(config)
        workload, may_begin = LocalWorkload(workers, config), asyncio.Event()
        part, carry_out = workload.trainer.fragments[0], workers.carry_out

        async def late(command: RunInnerLoop) -> InnerLoopDone:
            began.set()
            await may_begin.wait()
            return await carry_out(command)

        async def on_captured(fragment: int) -> None:
            if fragment == 0:
                base, local = workload._fragments[0].base, workload.trainer.vectors.local[part]
                assert np.abs(base - local).mean() < 0.1, "more than two inner steps can do"
            await leave(workload, 0, fragment)

        began = asyncio.Event()
        workers.carry_out = late  # type: ignore[method-assign]
        training = asyncio.create_task(workload.run_inner_loop(LEASE, ignore, on_captured))
        await began.wait()
        await step_from(workload, 0, 0.25)
        may_begin.set()
        await training

    tell(story)


def test_an_entry_that_others_made_before_is_taken_at_the_offset(config: RunConfig) -> None:
    """What workers have learned until then still counts from the theta that it began with."""

    async def story() -> None:
        workload = LocalWorkload(ThreadedWorkers(config), config)
        part = workload.trainer.fragments[0]
        before = workload.trainer.vectors.theta[part].copy()
        steps = list[asyncio.Task[None]]()

        async def on_captured(fragment: int) -> None:
            await asyncio.gather(*steps)
            local = workload.trainer.vectors.local[part].copy()
            contribution = bytes(await workload.contribution(fragment))
            if fragment == 0:
                assert contribution == encoded(before, local)
            await workload.unchanged(0, fragment)  # as a driver says that can offer it to nobody

        def overtake(progress: Progress) -> None:
            if not steps:
                steps.append(asyncio.create_task(step_from(workload, 0, 0.25)))

        await workload.run_inner_loop(LEASE, overtake, on_captured)
        moved = np.abs(present_weights(workload) - workload.trainer.vectors.theta)
        assert moved[part].max() < 0.1  # it went on from the new values, and has trained two steps from there
        assert not np.array_equal(workload.trainer.vectors.theta[part], before)

    tell(story)


def test_an_entry_after_one_that_changed_nothing_is_taken_at_the_offset(config: RunConfig) -> None:
    """Regression: workers went on with what they had, and the next entry took it: it counted twice."""

    async def story() -> None:
        workload, steps = LocalWorkload(ThreadedWorkers(config), config), list[asyncio.Task[None]]()
        part = workload.trainer.fragments[0]

        async def skipped_and_then_made() -> None:
            await workload.unchanged(0, 0)
            await step_from(workload, 0, 0.25, index=1)

        def overtake(progress: Progress) -> None:
            if not steps:
                steps.append(asyncio.create_task(skipped_and_then_made()))

        async def on_captured(fragment: int) -> None:
            await asyncio.gather(*steps)
            await workload.contribution(fragment)
            if fragment:
                await workload.unchanged(0, fragment)

        await workload.run_inner_loop(LEASE, overtake, on_captured)
        moved = np.abs(present_weights(workload) - workload.trainer.vectors.theta)
        assert moved[part].max() < 0.1, "it went on from the new values"

    tell(story)


def test_what_a_payload_has_left_out_is_kept_while_it_waits_for_an_entry(small_content: dict[str, Any]) -> None:
    """Regression: an entry that changed nothing had it forgotten, and a later one took the payload."""
    config = streaming_config(small_content, "int8 feedback", {"layers_per_fragment": 2})

    async def story() -> None:
        workload, steps = LocalWorkload(ThreadedWorkers(config), config), list[asyncio.Task[None]]()

        def overtake(progress: Progress) -> None:
            if not steps:
                steps.append(asyncio.create_task(step_from(workload, 1, 0.25)))

        async def on_captured(fragment: int) -> None:
            await asyncio.gather(*steps)
            await workload.contribution(fragment)
            if fragment == 0:
                await workload.unchanged(0, fragment)

        await workload.run_inner_loop(LEASE, overtake, on_captured)
        await workload.unchanged(1, 1)
        assert [np.any(workload._fragments[fragment].residual.to_add()) for fragment in (0, 1)] == [False, True]

    tell(story)


def test_workers_that_wait_can_be_stopped_and_then_begin_with_theta(config: RunConfig) -> None:
    async def story() -> None:
        workload = LocalWorkload(ThreadedWorkers(config), config)
        stored = asyncio.Event()

        async def on_captured(fragment: int) -> None:
            await workload.contribution(fragment)
            stored.set()

        training = asyncio.create_task(workload.run_inner_loop(LEASE, ignore, on_captured))
        await stored.wait()
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        await step_from(workload, 0, 0.25)  # late: nobody waits for it any more
        await workload.run_inner_loop(InnerLoop(0, (), 4, 0), ignore, partial(leave, workload, 0))
        assert np.array_equal(present_weights(workload), workload.trainer.vectors.theta)

    tell(story)


def test_after_another_state_was_fetched_workers_begin_with_it(config: RunConfig) -> None:
    async def story() -> None:
        workload = LocalWorkload(ThreadedWorkers(config), config)
        state = bytearray(workload.state_size)
        await workload.copy_state(memoryview(state))
        digest = await workload.state_digest()
        await workload.run_inner_loop(LEASE, ignore, partial(leave, workload, 0))
        await leave(workload, 0, 2)
        await workload.restore(bytes(state), digest)
        await workload.run_inner_loop(InnerLoop(1, (), 4, 0), ignore, partial(leave, workload, 1))
        assert np.array_equal(present_weights(workload), workload.trainer.vectors.theta)

    tell(story)


LATE = {"layers_per_fragment": 1, "overlap": 4}
"""Of 5 fragments and 8 inner steps, the averages of four are due when all fragments are stored."""


@pytest.mark.parametrize("is_fetched", [True, False])
@pytest.mark.parametrize("is_our_turn", [True, False])
def test_averages_that_nobody_will_tell_of_keep_nothing_waiting(
    small_content: dict[str, Any], is_fetched: bool, is_our_turn: bool
) -> None:
    """Regression: where workers waited for them, and another state was fetched, an evaluation waited for ever."""

    async def story() -> None:
        config = streaming_config(small_content, "int8", LATE, 8)
        workload = LocalWorkload(ThreadedWorkers(config), config)
        state = bytearray(workload.state_size)
        await workload.copy_state(memoryview(state))
        digest, last = await workload.state_digest(), len(workload.fragments) - 1
        for index in range(2):  # the second goes on, and stores all before any is due
            work = InnerLoop(index, (SampleRange(16 * index, 16 * index + 16),), 8, 256 * index)
            await workload.run_inner_loop(
                work, ignore, partial(leave, workload, index) if index == 0 else only_take(workload)
            )
            if index == 0:
                await leave(workload, 0, last)
        await workload.contribution(last)
        if is_fetched:
            await workload.restore(bytes(state), digest)
        else:
            for fragment in range(last):
                await workload.unchanged(1, fragment)
        workload.is_our_turn = lambda: is_our_turn
        await workload.run_inner_loop(InnerLoop(2, (), 8, 512), ignore, partial(leave, workload, 2))
        weights = present_weights(workload)
        assert np.array_equal(weights, workload.trainer.vectors.theta), "it has begun with theta"

    tell(story)


def only_take(workload: LocalWorkload) -> OnCaptured:
    async def on_captured(fragment: int) -> None:
        await workload.contribution(fragment)

    return on_captured


def test_a_peer_that_begins_has_trained_what_it_says_that_it_has(small_content: dict[str, Any]) -> None:
    """Regression: with no more inner steps than its overlap, it gave nothing for as many tokens as it was to train."""

    async def story() -> None:
        config = streaming_config(small_content, "int8", {"layers_per_fragment": 2, "overlap": 3}, 8)
        workload = LocalWorkload(ThreadedWorkers(config), config)
        trained = await workload.run_inner_loop(InnerLoop(0, LEASE.samples, 2, 0), ignore, partial(leave, workload, 0))
        part = workload.trainer.fragments[-1]
        theta, local = workload.trainer.vectors.theta[part], workload.trainer.vectors.local[part]
        assert trained.tokens == 4 * 16
        assert np.abs(theta - local).max() > 0.01, "two inner steps"
        assert trained.loss > 0

    tell(story)


def test_what_goes_wrong_with_a_capture_ends_the_training(config: RunConfig) -> None:
    async def story() -> None:
        workload = LocalWorkload(ThreadedWorkers(config), config)

        async def on_captured(fragment: int) -> None:
            raise WorkerError("the trained weights are unusable")

        with pytest.raises(WorkerError, match="unusable"):
            await workload.run_inner_loop(LEASE, ignore, on_captured)
        await workload.run_inner_loop(LEASE, ignore, partial(leave, workload, 0))

    tell(story)


class Mortal(ThreadedWorkers):
    """Workers that are lost when fragment `dies_at` of their first training is captured, or what is said of it."""

    dies_at: int | None = None

    async def run_inner_loop(
        self,
        work: InnerLoop,
        on_progress: Callable[[Progress], None],
        on_captured: OnCaptured = captures_nothing,
        from_local: bool = False,
        goes_on: bool = False,
    ) -> Trained:
        async def captured(fragment: int) -> None:
            await on_captured(fragment)
            if fragment == self.dies_at:
                self.dies_at = None
                raise WorkersRestartedError

        try:
            return await super().run_inner_loop(work, on_progress, captured, from_local, goes_on)
        except WorkersRestartedError:
            self.start_anew()
            raise


@pytest.mark.parametrize("dies_at", [0, 1])
@pytest.mark.parametrize("is_applied", [False, True])
def test_new_workers_are_told_what_became_of_what_the_lost_ones_had_stored(
    config: RunConfig, dies_at: int, is_applied: bool
) -> None:
    """And nothing is given to the swarm twice."""

    async def story() -> None:
        workers = Mortal(config)
        workers.dies_at = dies_at
        workload, captured = LocalWorkload(workers, config), list[int]()

        async def decide(fragment: int) -> None:
            await step_from(workload, fragment, 0.25)

        async def on_captured(fragment: int) -> None:
            captured.append(fragment)
            await workload.contribution(fragment)
            if is_applied or fragment != dies_at:
                await decide(fragment)
            else:
                late.append(asyncio.create_task(decide_later(fragment)))

        async def decide_later(fragment: int) -> None:
            await train_anew.wait()
            await decide(fragment)

        def on_progress(progress: Progress) -> None:
            seen.append(progress.inner_step)
            if seen.count(1) == 2:
                train_anew.set()

        seen, late, train_anew = list[int](), list[asyncio.Task[None]](), asyncio.Event()
        trained = await workload.run_inner_loop(LEASE, on_progress, on_captured)
        await asyncio.gather(*late)
        assert captured == [0, 1]
        assert trained.samples == LEASE.samples
        await workload.contribution(2)
        await step_from(workload, 2, 0.25)
        await workload.run_inner_loop(NEXT, ignore, partial(leave, workload, 1))
        assert workers.went_on

    tell(story)
