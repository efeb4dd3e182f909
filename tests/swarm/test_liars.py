"""A real process that lies in a swarm of four: the honest go on, count, agree, and have the state that the log says.

One swarm lives through all lies, one after another. Each of them costs the others a round at most, and its own process
its place in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.swarm.liar_swarm import LiarSwarm
from tests.swarm.real_lies import CONVICTS, LEADERS, MEMBERS

pytestmark = pytest.mark.swarm
Story: TypeAlias = Callable[[LiarSwarm], Coroutine[None, None, None]]
Tell: TypeAlias = Callable[[Story], None]
TURNS = 20  # at most: donors are asked by chance, once they are reached
LONG = 4.0  # seconds: longer than the peers need to ask each other for chunks, on a busy machine, too
FALSE_SNAPSHOT = "a false snapshot"
FLIPPED = "a flipped bit"
WRONG = "wrong averages"
ALWAYS = ("a corrupt leader",)
"""Lies that are tried in each run of the tests; the others in thorough ones."""


def each(lies: Iterable[str]) -> list[object]:
    """Return the lies as cases."""
    return [pytest.param(lie, marks=[] if lie in ALWAYS else pytest.mark.thorough) for lie in lies]


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tell]:
    """Runs a story with the one swarm."""
    with asyncio.Runner() as runner:
        swarm = LiarSwarm(tmp_path_factory.mktemp("swarm"))
        try:
            runner.run(swarm.start())
            yield lambda story: runner.run(story(swarm))
        finally:
            runner.run(swarm.end())


@pytest.mark.parametrize("lie", each(LEADERS))
def test_a_leader_that_lies_is_turned_away_from(tell: Tell, lie: str) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.led_by_the_liar()
        await swarm.lie(lie)
        await swarm.thrive(lie)
        await swarm.be_honest()

    tell(story)


@pytest.mark.parametrize("lie", each(MEMBERS))
def test_all_honest_members_count_beside_one_that_lies(tell: Tell, lie: str) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.led_by_others()
        await swarm.lie(lie)
        await swarm.thrive(lie)
        if lie in CONVICTS:
            await swarm.found_out(f"is proven to lie: {CONVICTS[lie]}")
        await swarm.be_honest()

    tell(story)


@pytest.mark.thorough
def test_a_joiner_gets_the_state_of_the_log(tell: Tell) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.part_of(swarm.liar)  # else it has nothing to give
        swarm.liar.lie(FALSE_SNAPSHOT)
        for _ in range(TURNS):
            await swarm.restart(swarm.honest[-1])
            if swarm.liar.has_lied:
                break
        assert swarm.liar.has_lied, "no joiner has asked it"
        await swarm.thrive(FALSE_SNAPSHOT)
        await swarm.be_honest()

    tell(story)


@pytest.mark.thorough
def test_a_bit_that_flipped_is_put_right(tell: Tell) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.led_by_others()
        since = swarm.index + 1
        await swarm.lie(FLIPPED)
        await swarm.thrive(FLIPPED)
        await swarm.until(lambda: bool(swarm.whole(since)), "the state of all in the peer whose bit has flipped")
        await swarm.be_honest()

    tell(story)


@pytest.mark.thorough
def test_wrong_averages_are_found_out(tmp_path: Path) -> None:
    """A member that makes one of them again tells its owner. That is no proof, and the run goes on.

    In a swarm of its own, in which trainings last: a member that has trained again shows no more what it contributed.
    """

    async def story() -> None:
        swarm = LiarSwarm(tmp_path, training=LONG)
        try:
            await swarm.start()
            await swarm.led_by_others()
            await swarm.lie(WRONG)
            await swarm.found_out("averaged chunk")
            await swarm.thrive(WRONG)
        finally:
            await swarm.end()

    asyncio.run(story())
