"""Processes that are killed, stopped, frozen and cut off at named moments of a round: the others go on as one.

One swarm lives through all cases. Each ends with an entry of all.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import TypeAlias

import pytest

from tests.swarm.fault_peer import Moment
from tests.swarm.fault_swarm import PLACES, Swarm, Volunteer, divergences
from tests.swarm.networks import Network, NetworkError, network

pytestmark = pytest.mark.swarm
Fault: TypeAlias = Callable[[Volunteer], AbstractAsyncContextManager[None]]
Story: TypeAlias = Callable[[Swarm], Coroutine[None, None, None]]
Tell: TypeAlias = Callable[[Story], None]
LEADERS = (Moment.PROPOSING, Moment.COMMITTING)
PATIENCE = 4  # entries of all for which the moment may not come
TURNS = 6


@pytest.fixture(scope="module")
def machines() -> Iterator[Network | str]:
    """A network of the swarm's own, or why there is none."""
    with ExitStack() as stack:
        try:
            yield stack.enter_context(network(PLACES))
        except NetworkError as error:
            yield str(error)


@pytest.fixture(scope="module")
def tell(machines: Network | str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tell]:
    """Runs a story with the one swarm."""
    with asyncio.Runner() as runner:
        swarm = Swarm(None if isinstance(machines, str) else machines, tmp_path_factory.mktemp("swarm"))
        try:
            runner.run(swarm.start())
            yield lambda story: runner.run(story(swarm))
        finally:
            runner.run(swarm.end())


@pytest.fixture
def cables(machines: Network | str) -> None:
    """For who is about to cut one."""
    if isinstance(machines, str):
        pytest.skip(f"no network namespaces here: {machines}")


async def strike(swarm: Swarm, fault: Fault, moment: Moment) -> tuple[Volunteer, int]:
    """Wait until a peer has struck itself at this moment. Return it, and the entry that the round was about.

    A peer may have stopped leading, or reduce everything or nothing in these rounds, so that its moment never comes:
    after a few entries another one is chosen.
    """
    for turn in range(TURNS):
        leader, *members = swarm.leader_and_members()
        victim = leader if moment in LEADERS else members[-1 - turn % len(members)]
        victim.arm(moment, signal.SIGKILL if fault is Volunteer.killed else signal.SIGSTOP)
        await is_struck_or_disarmed(swarm, victim, moment)
        if victim.struck_at is not None:
            return victim, victim.struck_at
    pytest.fail(f"no peer was {moment}")


async def is_struck_or_disarmed(swarm: Swarm, victim: Volunteer, moment: Moment) -> None:
    enough = swarm.index + PATIENCE
    await swarm.until(lambda: not victim.is_armed or bool(swarm.whole(enough)), f"a peer that is {moment}")
    if victim.is_armed:
        victim.disarm()
        await swarm.until(lambda: not victim.is_armed, "a peer that struck or is disarmed")


async def go_on_without(swarm: Swarm, victim: Volunteer, index: int) -> None:
    """The others make the entry, and the next one."""
    others = [one for one in swarm.volunteers if one is not victim]
    await swarm.until(lambda: all(index in one.applied for one in others), f"entry {index}, begun with the victim")
    await swarm.until(lambda: all(index + 1 in one.applied for one in others), f"entry {index + 1}, without it")
    assert not divergences(others, index)


async def become_whole(swarm: Swarm) -> None:
    """Wait for an entry of all, with the same bits."""
    index = swarm.index + 1
    await swarm.until(lambda: bool(swarm.whole(index)), "an entry of all")


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        pytest.param(Volunteer.killed, Moment.SENDING, marks=pytest.mark.thorough),
        pytest.param(Volunteer.killed, Moment.REDUCING, marks=pytest.mark.thorough),
        pytest.param(Volunteer.killed, Moment.PROPOSING, marks=pytest.mark.thorough),
        (Volunteer.killed, Moment.COMMITTING),
        pytest.param(Volunteer.frozen, Moment.SENDING, marks=pytest.mark.thorough),
        (Volunteer.stopped, Moment.REDUCING),
        pytest.param(Volunteer.stopped, Moment.COMMITTING, marks=pytest.mark.thorough),
        (Volunteer.cut_off, Moment.SENDING),
        pytest.param(Volunteer.cut_off, Moment.COMMITTING, marks=pytest.mark.thorough),
    ],
)
def test_the_others_go_on_and_it_comes_back(
    tell: Tell, fault: Fault, moment: Moment, request: pytest.FixtureRequest
) -> None:
    if fault is Volunteer.cut_off:
        request.getfixturevalue("cables")

    async def story(swarm: Swarm) -> None:
        victim, index = await strike(swarm, fault, moment)
        async with fault(victim):
            await go_on_without(swarm, victim, index)
        await become_whole(swarm)

    tell(story)


@pytest.mark.thorough
@pytest.mark.usefixtures("cables")
def test_two_lineages_become_one(tell: Tell) -> None:
    """Who is cut off for longer than the partition grace makes entries of its own, until it meets the others."""

    async def story(swarm: Swarm) -> None:
        victim, index = await strike(swarm, Volunteer.cut_off, Moment.REDUCING)
        async with victim.cut_off():
            await go_on_without(swarm, victim, index)
            await swarm.until(lambda: bool(divergences(swarm.volunteers, index)), "an entry of its own")
        await become_whole(swarm)

    tell(story)
