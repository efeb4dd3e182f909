"""A peer that needs several cycles for one lease, in a run that streams: what it has learned of each fragment counts,
as the reference has it, bit for bit."""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.training.reference import Reference, Work
from opendiloco.volunteer.local_workload import LocalWorkload
from peers.protocol.weights import aged
from peers.values.leases import SampleRange, sample_count
from peers.values.manifest import LoggedAmendment
from peers.values.workload import InnerLoop, Progress, Reduction, Trained
from tests.opendiloco.volunteer.test_late_work import logged
from tests.opendiloco.volunteer.threaded_workers import ThreadedWorkers

TOKENS = 16
"""Of a sample."""
PARTS = 3


def work(replica: str, first: int, age: int = 0, fragments: tuple[int, ...] | None = None) -> Work:
    return Work(replica, (SampleRange(first, first + 8),), 4, age=age, fragments=fragments)


def format_of(began_at: int, replica: str, fragment: int, count: int) -> int:
    """Return the format of a contribution: each of so many in turn."""
    return (began_at + fragment + ord(replica)) % count


OUTER_STEPS = (
    (work("a", 0), work("b", 8)),
    (work("a", 16), work("b", 24, 0, (0,))),  # b is in time with its first fragment, and then gets slower and slower
    (work("a", 32), work("b", 24, 1, (1,))),
    (work("a", 40), work("b", 24, 2, (2,))),
    (work("b", 48, 0, ()), work("a", 56)),  # it goes on from where it is, and is late with all of it
    (work("b", 48, 1), work("a", 64)),
    (work("a", 72), work("b", 80)),
)


def config_of(small_content: dict[str, Any], codec: dict[str, Any], streaming: dict[str, Any]) -> RunConfig:
    content = copy.deepcopy(small_content) | {"codec": codec, "streaming": {"layers_per_fragment": 2} | streaming}
    content["model"]["config"]["num_hidden_layers"] = 4
    content |= {"outer_steps": 9, "rounds": {"policy": "asynchronous", "staleness": 2}}
    return RunConfig.from_manifest_content(content)


def ignore(progress: Progress) -> None:
    pass


class Swarm:
    """Takes what a peer has learned of a fragment in the outer step that the rosters say, and no sooner. The first
    entries take in the `amendments`, one each."""

    def __init__(self, config: RunConfig, amendments: Sequence[LoggedAmendment] = (), formats: int = 1) -> None:
        self.amendments = amendments
        self.peers = {name: LocalWorkload(ThreadedWorkers(config), config) for name in "ab"}
        self.fragments = len(self.peers["a"].fragments)
        self.trainings: dict[str, asyncio.Task[Trained]] = {}
        self.turns: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self.given: dict[tuple[str, int], asyncio.Future[bytes]] = {}
        self.formats = formats
        self.tokens = 0

    async def outer_step(self, index: int, roster: Sequence[Work]) -> bytes:
        for each in roster:
            if each.age == 0:
                self.trainings[each.replica] = self.begin(index, each)
        for fragment in range(self.fragments):
            await self.average(index, fragment, [each for each in roster if each.contributes_to(fragment)])
        self.tokens += sum(
            TOKENS * sample_count(each.samples) for each in roster if each.contributes_to(self.fragments - 1)
        )
        digests = {await peer.state_digest() for peer in self.peers.values()}
        assert len(digests) == 1
        return digests.pop()

    def begin(self, index: int, each: Work) -> asyncio.Task[Trained]:
        for fragment in range(self.fragments):
            self.turns[each.replica, fragment].clear()
            self.given[each.replica, fragment] = asyncio.get_running_loop().create_future()
        return asyncio.create_task(self.train(index, each))

    async def train(self, index: int, each: Work) -> Trained:
        name = each.replica

        async def take(fragment: int) -> None:
            await self.turns[name, fragment].wait()
            format = format_of(index, name, fragment, self.formats)
            self.given[name, fragment].set_result(bytes(await self.peers[name].contribution(fragment, format)))

        loop = InnerLoop(index, each.samples, each.steps, self.tokens, tuple(self.amendments[:index]))
        trained = await self.peers[name].run_inner_loop(loop, ignore, take)
        await take(self.fragments - 1)
        return trained

    async def average(self, index: int, fragment: int, present: Sequence[Work]) -> None:
        weighted = []
        formats = [format_of(index - each.age, each.replica, fragment, self.formats) for each in present]
        for each in present:
            self.turns[each.replica, fragment].set()
            tokens = TOKENS * sample_count(each.samples)
            weighted.append((await self.given[each.replica, fragment], aged(tokens, each.age)))
        reduction = Reduction(weighted, 0, fragment=fragment, index=index, formats=formats)
        payload = bytes(await self.peers["a"].reduce(reduction))
        in_force = self.amendments[:index][-1].amendment if self.amendments[:index] else None
        for name, peer in self.peers.items():
            counts = name in [each.replica for each in present]
            keeps_work = not (counts and fragment == self.fragments - 1)
            kept = {"keeps_work": keeps_work, "counts": counts}
            await peer.apply(payload, index, fragment, **kept, amendment=in_force)

    async def run(self) -> list[bytes]:
        digests = [await self.outer_step(index, roster) for index, roster in enumerate(OUTER_STEPS)]
        await asyncio.gather(*self.trainings.values())
        return digests


MIXED = ["int8", "e2m1", "sparse"]


@pytest.mark.parametrize(
    ("codec", "streaming"),
    [
        pytest.param({"kind": "int8", "contributions": ["int8"]}, {"overlap": 0}, marks=pytest.mark.thorough),
        ({"kind": "e3m0", "rounding": "stochastic"}, {"overlap": 2, "alpha": 0.5}),
        pytest.param({"contributions": MIXED}, {"overlap": 1}, marks=pytest.mark.thorough),
        ({"contributions": MIXED, "rounding": "stochastic", "error_feedback": 0.5}, {"overlap": 1}),
        ({"kind": "sparse"}, {"overlap": 1}),
    ],
    ids=["all wait", "chance", "mixed formats", "mixed formats, chance, feedback", "what payloads leave out"],
)
def test_a_slow_peers_work_counts_for_each_fragment_as_in_the_reference(
    small_content: dict[str, Any], codec: dict[str, Any], streaming: dict[str, Any]
) -> None:
    config = config_of(small_content, codec, streaming)
    count = len(config.codec.contributions)
    rosters = [
        [
            replace(
                each, formats=tuple(format_of(index - each.age, each.replica, part, count) for part in range(PARTS))
            )
            for each in roster
        ]
        for index, roster in enumerate(OUTER_STEPS)
    ]
    expected = list(Reference(config).run(rosters))

    async def story() -> None:
        assert await Swarm(config, formats=count).run() == expected

    asyncio.run(asyncio.wait_for(story(), 60.0))


def test_a_run_that_streams_goes_on_where_its_last_entry_makes_it_longer(small_content: dict[str, Any]) -> None:
    """In its last outer step nothing is awaited any more; it then is none."""
    config = config_of(small_content, {}, {"overlap": 2, "alpha": 0.5}).model_copy(update={"outer_steps": 3})
    values: list[dict[str, object]] = [{}, {"inner_learning_rate_factor": 0.5}, {"outer_steps": len(OUTER_STEPS)}]
    amendments = [logged(number, 16 * number, each) for number, each in enumerate(values, 1)]
    reference, expected = Reference(config), list[bytes]()
    for index, roster in enumerate(OUTER_STEPS):
        reference.amend(amendments[:index])
        expected.append(reference.outer_step(roster))

    async def story() -> None:
        assert await Swarm(config, amendments).run() == expected

    asyncio.run(asyncio.wait_for(story(), 60.0))
