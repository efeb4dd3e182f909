"""A volunteer that leaves waits until another machine has the newest outer step, and says which do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendiloco.storage.files import MANIFEST
from opendiloco.volunteer import volunteer as module
from opendiloco.volunteer.volunteer import Volunteer
from peers.presence.heartbeat import Heartbeat, PeerState
from tests.peers.heartbeats import beat
from tests.peers.logs import LOG

ME, STEP = "m", 5
ARCHIVE, LATE_ARCHIVE = ("archive", PeerState.ARCHIVING, STEP), ("archive", PeerState.ARCHIVING, STEP - 1)


class Leaving(Volunteer):
    """A volunteer without a swarm, at outer step STEP."""

    def __init__(self, *others: tuple[str, PeerState, int], is_exchanging: bool = False) -> None:
        self.beats = [beat(peer, LOG, state, index=index) for peer, state, index in others]
        position = SimpleNamespace(position=SimpleNamespace(index=STEP), amendment=None)
        peer = SimpleNamespace(me=ME, log=position, settled=position, is_exchanging=is_exchanging)
        self.has_left = False
        self.held: list[bool] = []
        driver: Any = SimpleNamespace(peer=peer, leave=lambda: setattr(self, "has_left", True))
        self._driver, self._leaving, self._folder = driver, None, "a folder"
        self.run = cast(Any, SimpleNamespace(config=None))

    def others(self) -> list[Heartbeat]:
        return self.beats

    def hold(self, held: bool) -> None:
        self.held.append(held)


def training(peer: str, index: int = STEP) -> tuple[str, PeerState, int]:
    return peer, PeerState.TRAINING, index


@pytest.fixture(autouse=True)
def longer_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is not finished yet, with the volunteer's folder of it."""
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / MANIFEST).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "outer_steps_in_force", lambda config, amendment: STEP + 1)


@pytest.mark.parametrize(
    ("others", "waits", "farewell"),
    [
        ([], False, "only this machine has outer step 5: join again from it to continue the run there"),
        ([LATE_ARCHIVE], True, "only this machine has outer step 5: join again"),
        ([ARCHIVE], False, "outer step 5 is with 1 archive"),
        ([training("z"), LATE_ARCHIVE], False, "outer step 5 is with 1 other volunteer"),
        ([training("a"), LATE_ARCHIVE], True, "outer step 5 is with 1 other volunteer"),  # all may leave at once
        ([training("a"), training("z"), ARCHIVE], False, "outer step 5 is with 1 archive and 2 other volunteers"),
        ([training("z", STEP - 1)], True, "only this machine"),
        ([("z", PeerState.JOINING, 0)], False, "only this machine"),
    ],
)
def test_it_waits_for_a_machine_that_will_have_the_newest_outer_step(
    others: list[tuple[str, PeerState, int]], waits: bool, farewell: str
) -> None:
    """Regression: an archive lacked the last outer steps of a run whose last volunteer had left."""
    leaving = Leaving(*others)
    assert leaving._is_handed_over is not waits
    assert farewell in leaving.farewell()


def test_it_leaves_when_an_archive_has_it_and_trains_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAND_OVER_LOOK", 0.0)
    leaving = Leaving(LATE_ARCHIVE)

    async def leave() -> None:
        leaving.leave()
        leaving.leave()  # another word changes nothing
        for _ in range(10):
            await asyncio.sleep(0)
        assert leaving.held == [True]
        assert not leaving.has_left
        leaving.beats = Leaving(ARCHIVE).beats
        while not leaving.has_left:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(leave(), 10))


def test_it_waits_for_some_seconds_only_and_not_while_a_round_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Leaving(ARCHIVE, is_exchanging=True)._is_handed_over
    monkeypatch.setattr(module, "HAND_OVER_SECONDS", 0.0)
    leaving = Leaving(LATE_ARCHIVE)

    async def leave() -> None:
        leaving.leave()
        while not leaving.has_left:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(leave(), 10))


def test_of_two_that_leave_at_once_the_last_one_has_the_only_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each of them believed that the other one stays."""
    monkeypatch.setattr(module, "HAND_OVER_LOOK", 0.0)
    first, last = Leaving(training("z")), Leaving(training("a"))

    async def leave() -> None:
        first.leave()
        last.leave()
        while not first.has_left:
            await asyncio.sleep(0)
        assert not last.has_left
        last.beats = []  # a peer that has announced its leaving is not live
        while not last.has_left:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(leave(), 1))
    assert "outer step 5 is with 1 other volunteer" in first.farewell()
    assert "only this machine has outer step 5" in last.farewell()


def test_the_last_one_does_not_wait_for_one_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_SECONDS", 0.0)
    leaving = Leaving(training("a"))

    async def leave() -> None:
        leaving.leave()
        while not leaving.has_left:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(leave(), 1))


def test_who_leaves_a_finished_run_alone_learns_how_to_take_the_model_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "outer_steps_in_force", lambda config, amendment: STEP)
    leaving = Leaving()
    assert leaving.farewell().endswith(
        "has the model: to take it out, diloco-peer export --from 'a folder' --out model"
    )
    leaving._folder = None
    assert leaving.farewell() == "left the run; no other machine has outer step 5, and this machine keeps nothing"


def test_a_folder_that_was_moved_away_is_no_promise(tmp_path: Path) -> None:
    """Regression: it was named as the only place of the newest outer step."""
    (tmp_path / "a folder" / MANIFEST).unlink()
    gone = "left the run; no other machine has outer step 5, and this machine's folder a folder is gone"
    assert Leaving().farewell() == gone


def test_who_ends_it_in_a_long_pause_learns_only_what_is_still_true(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = Leaving(training("z"))
    words = "left the run; this machine's disk has outer step 5: join again from it to continue the run there"
    assert leaving.farewell(is_away=True) == words
    monkeypatch.setattr(module, "outer_steps_in_force", lambda config, amendment: STEP)
    assert "left the finished run; this machine's disk has the model: to" in leaving.farewell(is_away=True)
    leaving._folder = None
    assert leaving.farewell(is_away=True) == "left the run; this machine keeps nothing"


@pytest.mark.parametrize(
    ("others", "changed", "warns"),
    [
        ([], {}, True),
        ([ARCHIVE], {}, False),
        ([], {"last": "an entry"}, False),
        ([], {"is_training": False}, False),
        ([], {"organiser": ME}, False),  # it knows that its run is new
    ],
)
def test_a_volunteer_that_begins_a_run_alone_is_warned(
    others: list[tuple[str, PeerState, int]], changed: dict[str, Any], warns: bool
) -> None:
    """Regression: a run whose volunteers had all left was begun again without a word."""
    facts = {"last": None, "is_training": True, "organiser": "o"} | changed
    alone, here = Leaving(*others), SimpleNamespace
    peer = here(me=ME, log=here(last=facts["last"]), trainer=here(is_training=facts["is_training"]))
    alone._driver = cast(Any, here(peer=peer))
    alone.run = cast(Any, here(manifest=here(organiser=facts["organiser"])))
    assert alone._founds_alone is warns
    assert "Ctrl-C" not in module.ALONE, "a program that calls the library has no terminal"
