"""Work that is late for an asynchronous run's outer step: a swarm's training side and the reference agree on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opendiloco.config.overrides import Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.training.reference import Reference, Work
from opendiloco.volunteer.local_workload import LocalWorkload, TrainerWorkload
from opendiloco.workers.group import WorkerGroup
from opendiloco.workers.options import WorkerOptions
from peers.protocol.weights import aged
from peers.values.leases import SampleRange
from peers.values.manifest import Amendment, LoggedAmendment
from peers.values.workload import Blocks, InnerLoop, Progress, Reduction
from tests.opendiloco.conftest import write_corpus

LATE = Work("b", (SampleRange(24, 30),), 3, age=1)
OUTER_STEPS = [
    [Work("a", (SampleRange(0, 8),), 4), Work("b", (SampleRange(8, 16),), 4)],
    [Work("a", (SampleRange(16, 24),), 4)],
    [Work("a", (SampleRange(30, 38),), 4), LATE],
    [Work("a", (SampleRange(38, 46),), 4), Work("b", (SampleRange(46, 54),), 4)],
]
TOKENS = 16
"""Of a sample."""


def ignore(progress: Progress) -> None:
    pass


def count_of(work: Work) -> int:
    return TOKENS * sum(piece.stop - piece.start for piece in work.samples)


class PairOfPeers:
    """a and b; b trains `LATE` while a makes the outer step before, and is done before it is made, or after. Before
    each outer step the log has taken in so many of the `amendments`."""

    def __init__(
        self,
        peers: Sequence[LocalWorkload],
        is_done_before: bool,
        amendments: Sequence[LoggedAmendment] = (),
    ) -> None:
        self.peers = dict(zip("ab", peers, strict=True))
        self.is_done_before = is_done_before
        self.amendments = amendments
        self.done: dict[str, Blocks] = {}
        self.began = [0]  # the run's tokens when each outer step began

    async def outer_step(self, index: int, roster: Sequence[Work], later: Work | None) -> bytes:
        """Take an outer step. One peer's work is `later`: it trains now, for the next one."""
        for work in (*roster, *((later,) if later else ())):
            if work.age == 0 or work is later:
                loop = InnerLoop(index, work.samples, work.steps, self.began[-1], tuple(self.amendments[:index]))
                await self.peers[work.replica].run_inner_loop(loop, ignore)
        if later and self.is_done_before:
            self.done[later.replica] = await self.peers[later.replica].contribution()
        payloads = [(await self.contribution(work), aged(count_of(work), work.age)) for work in roster]
        payload = await self.peers["a"].reduce(Reduction(payloads, 0, index=index))
        in_force = self.amendments[:index][-1].amendment if self.amendments[:index] else None
        for name, peer in self.peers.items():
            is_in = name in [work.replica for work in roster]
            await peer.apply(payload, index, keeps_work=not is_in, counts=is_in, amendment=in_force)
        self.began.append(self.began[-1] + sum(map(count_of, roster)))
        digests = {await peer.state_digest() for peer in self.peers.values()}
        assert len(digests) == 1
        return digests.pop()

    async def contribution(self, work: Work) -> Blocks:
        """Return what a peer has trained, encoded once."""
        peer = self.peers[work.replica]
        return self.done.pop(work.replica) if work.replica in self.done else await peer.contribution()


def by_two_peers(config: RunConfig, is_done_before: bool, amendments: Sequence[LoggedAmendment] = ()) -> list[bytes]:
    """Return the state digests after the outer steps."""

    async def story() -> list[bytes]:
        groups = await asyncio.gather(*(WorkerGroup.start(config, WorkerOptions(device="cpu")) for _ in "ab"))
        pair = PairOfPeers([TrainerWorkload(group, config) for group in groups], is_done_before, amendments)
        try:
            later = [None, LATE, None, None]
            return [await pair.outer_step(index, roster, later[index]) for index, roster in enumerate(OUTER_STEPS)]
        finally:
            await asyncio.gather(*(group.close() for group in groups))

    return asyncio.run(asyncio.wait_for(story(), 100))  # two workers start: twice torch and transformers


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "is_done_before"), [("int8", False), ("sparse", True)])
def test_late_work_counts_from_where_it_began_and_less_the_older_it_is(
    small_content: dict[str, Any], kind: str, is_done_before: bool
) -> None:
    """Also what payloads leave out: whenever work is done, it makes up for what the one before has left out."""
    rounds = {"policy": "asynchronous"}
    content = small_content | {"outer_steps": 4, "rounds": rounds, "codec": {"kind": kind, "error_feedback": 0.9}}
    config = RunConfig.from_manifest_content(content)
    expected = list(Reference(config).run(OUTER_STEPS))
    assert by_two_peers(config, is_done_before) == expected
    early = [*OUTER_STEPS[:2], [OUTER_STEPS[2][0], replace(LATE, age=0)], OUTER_STEPS[3]]
    assert list(Reference(config).run(early))[2] != expected[2]


@pytest.mark.thorough
def test_late_work_trains_with_what_was_in_force_where_it_began_and_reads_what_its_lease_had(
    small_content: dict[str, Any], tmp_path: Path
) -> None:
    """Its samples were in a lease when the mixture changed."""
    cool_down = {"source": str(write_corpus(tmp_path / "cool-down", files=60)), "weight": 0}
    corpus = {"source": small_content["data"]["source"]}
    data = {"sources": [corpus, cool_down], "held_out": 0.2}
    content = small_content | {"outer_steps": 3, "rounds": {"policy": "asynchronous"}, "data": data}
    config = RunConfig.from_manifest_content(content)
    values: list[dict[str, object]] = [
        {"inner_learning_rate_factor": 0.5},
        {"inner_learning_rate_factor": 0.25, "outer_steps": 9, "weights": (1, 3)},
        {"decay": {"after": 3, "outer_steps": 2}, "outer_momentum": 0.3, "outer_steps": 4, "weights": (0, 1)},
    ]
    amendments = [logged(number, cursor, values[number - 1]) for number, cursor in ((1, 16), (2, 30), (3, 46))]

    def by_the_reference(amendments: Sequence[LoggedAmendment]) -> list[bytes]:
        reference, digests = Reference(config), list[bytes]()
        for index, roster in enumerate(OUTER_STEPS):
            reference.amend(amendments[:index])
            digests.append(reference.outer_step(roster))
        return digests

    expected = by_the_reference(amendments)
    assert by_two_peers(config, False, amendments) == expected
    first, second, third = amendments
    for changed, place in (
        (first.model_copy(update={"amendment": second.amendment}), 0),
        (second.model_copy(update={"cursor": 24}), 1),
        (second.model_copy(update={"cursor": 38}), 1),
        (third.model_copy(update={"cursor": 40}), 2),
    ):
        others = by_the_reference([*amendments[:place], changed, *amendments[place + 1 :]])
        assert others[:1] == expected[:1]
        assert others != expected, "each of them counts"


def logged(number: int, cursor: int, values: dict[str, object]) -> LoggedAmendment:
    content = Overrides.model_validate(values).content
    return LoggedAmendment(amendment=Amendment(number=number, content=content, signature=bytes(64)), cursor=cursor)


def test_work_that_is_too_old_is_no_part_of_an_outer_step(small_content: dict[str, Any]) -> None:
    config = RunConfig.from_manifest_content(small_content | {"rounds": {"policy": "asynchronous"}})
    reference = Reference(config)
    with pytest.raises(IndexError):
        reference.outer_step([LATE])
