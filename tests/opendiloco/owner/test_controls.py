"""The control socket: who may ask, what is answered, and paths that are too long for a socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from contextlib import AsyncExitStack
from pathlib import Path

from opendiloco.owner.controls import NAME, OwnerRequest, VolunteerStatus, ask, serve_controls, volunteers

PAUSED = VolunteerStatus(says="pausing", phase="training", reasons=("on battery",))


def asked(folder: Path, *lines: bytes) -> tuple[list[OwnerRequest], list[VolunteerStatus | None], int]:
    """Serve a socket; send it these lines, then a request. Returns the requests heard, the answer, and the mode."""
    heard: list[OwnerRequest] = []

    def answer(request: OwnerRequest) -> VolunteerStatus:
        heard.append(request)
        return PAUSED

    def send(line: bytes) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{descriptor}/{NAME}")
            connection.sendall(line)
            connection.recv(100)
        os.close(descriptor)

    async def serve() -> tuple[list[VolunteerStatus | None], int]:
        async with serve_controls(folder, answer):
            for line in lines:
                await asyncio.to_thread(send, line)
            mode = stat.S_IMODE((folder / NAME).stat().st_mode)
            return [await asyncio.to_thread(ask, folder / NAME, OwnerRequest(do="pause"))], mode

    answers, mode = asyncio.run(serve())
    return heard, answers, mode


def test_a_request_is_answered_by_a_socket_that_only_its_owner_may_use(tmp_path: Path) -> None:
    heard, answers, mode = asked(tmp_path)
    assert heard == [OwnerRequest(do="pause")]
    assert answers == [PAUSED]
    assert mode == 0o600
    assert not (tmp_path / NAME).exists()


def test_the_folder_may_have_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("run" * 30) / ("peer" * 30)
    assert asked(folder)[1] == [PAUSED]


def test_folders_that_remain_empty_are_removed(tmp_path: Path) -> None:
    """Regression: an invite with a mistyped run id left folders for a run that does not exist."""
    asked(tmp_path / "wrong run" / "peer")
    assert not (tmp_path / "wrong run").exists()
    (tmp_path / "run" / "peer").mkdir(parents=True)
    (tmp_path / "run" / "peer" / "run.manifest").touch()
    asked(tmp_path / "run" / "peer")
    assert (tmp_path / "run" / "peer" / "run.manifest").exists()


def test_what_is_no_request_is_passed_over(tmp_path: Path) -> None:
    wrong = [b"nonsense\n", json.dumps({"do": "explode"}).encode() + b"\n", b"x" * 10_000 + b"\n"]
    heard, answers, _ = asked(tmp_path, *wrong)
    assert heard == [OwnerRequest(do="pause")]
    assert answers == [PAUSED]


def test_a_socket_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / NAME))
    assert ask(tmp_path / NAME, OwnerRequest(do="look")) is None
    assert asked(tmp_path)[1] == [PAUSED]


def test_volunteers_are_found_by_run_while_they_answer(tmp_path: Path) -> None:
    async def scenario() -> list[list[str]]:
        folders = [tmp_path / run / "peer" for run in ("one", "two", "three")]
        async with AsyncExitStack() as stack:
            for folder in folders[:2]:
                await stack.enter_async_context(serve_controls(folder, lambda request: PAUSED))
            folders[2].mkdir(parents=True)
            (folders[2] / NAME).touch()
            found = [await asyncio.to_thread(volunteers, tmp_path, run) for run in (None, "two", "three")]
        return [[path.parent.parent.name for path in each] for each in found]

    assert asyncio.run(scenario()) == [["one", "two"], ["two"], []]
    assert volunteers(tmp_path) == {}
