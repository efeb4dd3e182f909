"""The control socket: who may ask, what is answered, and paths that are too long for a socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path

from opendiloco.owner.controls import NAME, Answer, Request, ask, serve_controls, sockets

PAUSED = Answer(says="pausing", phase="training", reasons=("on battery",))


def asked(folder: Path, *lines: bytes) -> tuple[list[Request], list[Answer | None], int]:
    """Serve a socket; send it these lines, then a request. Returns the requests heard, the answer, and the mode."""
    heard: list[Request] = []

    def answer(request: Request) -> Answer:
        heard.append(request)
        return PAUSED

    def send(line: bytes) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{descriptor}/{NAME}")
            connection.sendall(line)
            connection.recv(100)
        os.close(descriptor)

    async def serve() -> tuple[list[Answer | None], int]:
        async with serve_controls(folder, answer):
            for line in lines:
                await asyncio.to_thread(send, line)
            mode = stat.S_IMODE((folder / NAME).stat().st_mode)
            return [await asyncio.to_thread(ask, folder / NAME, Request(do="pause"))], mode

    answers, mode = asyncio.run(serve())
    return heard, answers, mode


def test_a_request_is_answered_by_a_socket_that_only_its_owner_may_use(tmp_path: Path) -> None:
    heard, answers, mode = asked(tmp_path)
    assert heard == [Request(do="pause")]
    assert answers == [PAUSED]
    assert mode == 0o600
    assert not (tmp_path / NAME).exists()


def test_the_folder_may_have_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("run" * 30) / ("peer" * 30)
    assert asked(folder)[1] == [PAUSED]


def test_what_is_no_request_is_passed_over(tmp_path: Path) -> None:
    wrong = [b"nonsense\n", json.dumps({"do": "explode"}).encode() + b"\n", b"x" * 10_000 + b"\n"]
    heard, answers, _ = asked(tmp_path, *wrong)
    assert heard == [Request(do="pause")]
    assert answers == [PAUSED]


def test_a_socket_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / NAME))
    assert ask(tmp_path / NAME, Request(do="look")) is None
    assert asked(tmp_path)[1] == [PAUSED]


def test_sockets_are_found_by_run(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / run / "peer").mkdir(parents=True)
        (tmp_path / run / "peer" / NAME).touch()
    assert [path.parent.parent.name for path in sockets(tmp_path)] == ["one", "two"]
    assert [path.parent.parent.name for path in sockets(tmp_path, "two")] == ["two"]
