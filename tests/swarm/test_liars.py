"""A real process that lies in a swarm of four: the honest go on, count, agree, and have the state that the log says.

One swarm lives through all lies, one after another. Each of them costs the others a round at most, and its own process
its place in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.swarm.liar_swarm import LiarSwarm
from tests.swarm.real_lies import LIES

pytestmark = pytest.mark.swarm
Story: TypeAlias = Callable[[LiarSwarm], Coroutine[None, None, None]]
Tell: TypeAlias = Callable[[Story], None]
TURNS = 20  # at most: donors are asked by chance, once they are reached; and what is under way goes on
LONG = 4.0  # seconds: longer than the peers need to ask each other for chunks, on a busy machine, too
LEADERS = ("a corrupt leader", "a leader that hands on its own")
TO_JOINERS = ("a false snapshot",)
FLIPPED = "a flipped bit"
WRONG = "wrong averages"
MEMBERS = tuple(name for name in LIES if name not in (*LEADERS, *TO_JOINERS, FLIPPED, WRONG))


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


@pytest.mark.parametrize("lie", [LEADERS[0], *(pytest.param(lie, marks=pytest.mark.thorough) for lie in LEADERS[1:])])
def test_a_leader_that_lies_is_turned_away_from(tell: Tell, lie: str) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.led_by_the_liar()
        await swarm.lie(lie)
        await swarm.thrive(lie)
        await swarm.be_honest()

    tell(story)


@pytest.mark.thorough
@pytest.mark.parametrize("lie", MEMBERS)
def test_a_member_that_lies_keeps_nobody_from_counting(tell: Tell, lie: str) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.led_by_others()
        await swarm.lie(lie)
        await swarm.thrive(lie)
        await swarm.be_honest()

    tell(story)


@pytest.mark.parametrize("lie", TO_JOINERS)
def test_who_joins_gets_the_state_of_the_log(tell: Tell, lie: str) -> None:
    async def story(swarm: LiarSwarm) -> None:
        await swarm.part_of(swarm.liar)  # else it has nothing to give
        swarm.liar.lie(lie)
        for _ in range(TURNS):
            await swarm.restart(swarm.honest[-1])
            if swarm.liar.has_lied:
                break
        assert swarm.liar.has_lied, "nobody who joined has asked it"
        await swarm.thrive(lie)
        await swarm.be_honest()

    tell(story)


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
def test_whoever_averages_wrongly_is_found_out_and_averages_no_more(tmp_path: Path) -> None:
    """Whoever finds it out exchanges nothing with the liar any more. So not all reach it, and it reduces nothing in
    later rounds, though the others have not found it out themselves.

    In a swarm of its own, in which trainings last: whoever has trained again shows no more what it contributed.
    """

    async def story() -> None:
        swarm = LiarSwarm(tmp_path, training=LONG)
        try:
            await swarm.start()
            await swarm.led_by_others()
            await swarm.lie(WRONG)
            await swarm.find_out("has averaged chunk")
            for _ in range(TURNS):
                swarm.liar.lie(WRONG)
                await swarm.thrive(WRONG)
                if not swarm.liar.has_lied:
                    break
            assert not swarm.liar.has_lied
        finally:
            await swarm.end()

    asyncio.run(story())
