"""What an export gets from the swarm, and the folder for it: made first, gone again if there is nothing to put in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opendiloco.errors import MachineError
from opendiloco.volunteer.states import fetch_state, new_folder
from peers.errors import SwarmUnreachableError
from tests.peers.heartbeats import beat
from tests.peers.transfer.test_following import UNSIGNED, Donor, Run, Swarm


def test_it_is_there_before_the_work_begins(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new" / "model"):
        assert list((tmp_path / "new" / "model").iterdir()) == []
    assert (tmp_path / "new" / "model").is_dir()


def test_work_that_fails_leaves_only_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "new" / "model"):
        with pytest.raises(ZeroDivisionError), new_folder(folder):
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_work_that_fails_half_way_leaves_what_it_wrote(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "model" / "weights").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model"):
        work()
    assert (tmp_path / "model" / "weights").exists()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder, cause in ((tmp_path, "is not empty"), (Path("/proc/model"), "cannot be used")):
        with pytest.raises(MachineError, match=cause) as caught, new_folder(folder):
            pytest.fail("it was said to be usable")
        assert caught.value.exit_code == 6
        assert "--out" in caught.value.remedy


# The newest state -----------------------------------------------------------------------------------------------
async def fetched(swarm: Swarm) -> object:
    """The last header of the state that the swarm's follower then has."""
    run: Any = SimpleNamespace(settings=UNSIGNED)
    transport: Any = swarm
    workload: Any = swarm.workload
    return (await fetch_state(run, transport, workload)).log.last


@pytest.mark.parametrize("kept", [0, 1, 3, 1000])
def test_the_newest_state_is_fetched_though_payloads_are_not_kept_for_long(kept: int) -> None:
    """Regression: where payloads are large only the last three are kept, and snapshots are frozen more seldom."""

    async def scenario() -> None:
        swarm, run = Swarm(), Run(9)
        for name in "ab":
            await swarm.add(name, Donor(run, frozen=2, kept=kept))
        assert await fetched(swarm) == run.logs[-1].last
        assert swarm.workload.state == run.states[-1]

    asyncio.run(scenario())


def test_who_is_ahead_and_gives_nothing_is_named() -> None:
    async def scenario() -> None:
        swarm, run = Swarm(), Run(9)
        await swarm.add("a", Donor(run, frozen=7))
        swarm.beats["a"] = beat("a", Run(12).logs[-1])
        with pytest.raises(SwarmUnreachableError, match="peer a refused: outer step 10 is not here yet"):
            await fetched(swarm)

    asyncio.run(scenario())


def test_a_lineage_that_is_left_meanwhile_is_left_here_too() -> None:
    """Regression: a snapshot was asked for that is further on than the heavier lineage."""

    class Splits(Swarm):
        async def heartbeats(self, run_id: str) -> list[Any]:
            if self.connected == ["a"]:
                await self.add("b", Donor(heavy, frozen=2))
            return await super().heartbeats(run_id)

    light, heavy = Run(5, b"light", 10), Run(3, b"heavy", 100)

    async def scenario() -> None:
        swarm = Splits()
        await swarm.add("a", Donor(light, frozen=5))
        assert await fetched(swarm) == heavy.logs[-1].last

    asyncio.run(scenario())
