"""The control socket of a volunteer, which answers one request of the owner for each connection.

The socket is a file in the run's folder that only the owner may open. A socket address holds only a short path, so both
sides name the folder through its descriptor.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from opendiloco.errors import MachineError
from peers.values.system import make_private_folder

NAME = "control"
ANSWER_SECONDS = 5.0  # most seconds for a request and its answer: a busy volunteer may take seconds
LINE_LIMIT = 4096  # most bytes of a request or an answer


class OwnerRequest(BaseModel):
    """A command of the owner. `anyway` makes "resume" overrule the conditions that pause the volunteer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    do: Literal["pause", "resume", "finish", "look"]
    anyway: bool = False


class VolunteerStatus(BaseModel):
    """A volunteer's answer to its owner. `reasons` are the reasons for a pause, `month` describes the month's traffic
    and its limits, and `initial_peers` are the addresses at which the volunteer looks for the run."""

    model_config = ConfigDict(frozen=True)

    says: str
    phase: str
    reasons: tuple[str, ...] = ()
    month: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()


@asynccontextmanager
async def serve_controls(folder: Path, answer: Callable[[OwnerRequest], VolunteerStatus]) -> AsyncIterator[None]:
    """Answer the owner's requests until the context ends, and remove the folder then if it is empty. Raises:
    MachineError if the socket cannot be created."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValidationError, ValueError):  # client disconnected, or invalid request
            async with asyncio.timeout(ANSWER_SECONDS):
                request = OwnerRequest.model_validate_json(await reader.readline())
                writer.write(answer(request).model_dump_json().encode() + b"\n")
                await writer.drain()
        writer.close()

    path = folder / NAME
    try:
        make_private_folder(folder)
        with _short(folder) as near:
            # A killed process may have left its socket. No running process has one here, because this process holds
            # the lock of the identity.
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            mask = os.umask(0o177)
            try:
                listener.bind(near)
            finally:
                os.umask(mask)
        server = await asyncio.start_unix_server(serve, sock=listener, limit=LINE_LIMIT)
    except OSError as error:
        raise MachineError(
            f"the control socket {path} cannot be created: {error.strerror}.", "Name another folder with --state."
        ) from error
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        with suppress(OSError):  # a folder that has other files stays
            folder.rmdir()
            folder.parent.rmdir()


def ask(path: Path, request: OwnerRequest) -> VolunteerStatus | None:
    """Return the answer of the volunteer at the socket `path`, or None if no volunteer answers."""
    try:
        with _short(path.parent) as near, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(near)
            connection.sendall(request.model_dump_json().encode() + b"\n")
            with connection.makefile("rb") as reader:
                return VolunteerStatus.model_validate_json(reader.readline(LINE_LIMIT))
    except (OSError, ValueError):
        return None


def volunteers(state: Path, run: str | None = None) -> dict[Path, VolunteerStatus]:
    """Return the status of each running volunteer in a state folder, by socket path; with `run`, only of that run's."""
    answers = {path: ask(path, OwnerRequest(do="look")) for path in sorted(state.glob(f"{run or '*'}/*/{NAME}"))}
    return {path: answer for path, answer in answers.items() if answer is not None}


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Yield a short path of the control socket in `folder`, because a socket's path has at most 107 bytes. The short
    path is valid until the context ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
