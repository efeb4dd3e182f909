"""The socket through which an owner's commands reach a volunteer on the same machine: one question, one answer.

It is a file in the run's folder that only its owner may use. Long paths do not fit into a socket's address, so it is
bound and dialled through the folder's descriptor.
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
ANSWER_SECONDS = 5.0  # for a request and its answer, on one machine; the volunteer may be busy
LINE_LIMIT = 4096  # bytes of a request, or of its answer


class OwnerRequest(BaseModel):
    """What the owner wants, or wants to know. `anyway` overrules conditions that hold."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    do: Literal["pause", "resume", "finish", "look"]
    anyway: bool = False


class VolunteerStatus(BaseModel):
    """What the volunteer says. It is paused while there are `reasons`. `month` has its traffic beside its limits."""

    model_config = ConfigDict(frozen=True)

    says: str
    phase: str
    reasons: tuple[str, ...] = ()
    month: tuple[str, ...] = ()


@asynccontextmanager
async def serve_controls(folder: Path, answer: Callable[[OwnerRequest], VolunteerStatus]) -> AsyncIterator[None]:
    """Answer requests until the context ends. Raises: MachineError when the socket cannot be made."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValidationError, ValueError):  # whoever asks is gone, or is none of us
            async with asyncio.timeout(ANSWER_SECONDS):
                request = OwnerRequest.model_validate_json(await reader.readline())
                writer.write(answer(request).model_dump_json().encode() + b"\n")
                await writer.drain()
        writer.close()

    path = folder / NAME
    try:
        make_private_folder(folder)
        with _short(folder) as near:
            path.unlink(missing_ok=True)  # of a process that was killed: the identity's lock keeps two from running
            listener = socket.socket(socket.AF_UNIX)
            mask = os.umask(0o177)
            try:
                listener.bind(near)
            finally:
                os.umask(mask)
        server = await asyncio.start_unix_server(serve, sock=listener, limit=LINE_LIMIT)
    except OSError as error:
        raise MachineError(
            f"the control socket {path} cannot be made: {error.strerror}.", "Name another folder with --state."
        ) from error
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def ask(path: Path, request: OwnerRequest) -> VolunteerStatus | None:
    """Return what the volunteer of a socket answers; None: nobody is there."""
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
    """Return what the volunteers below a state folder say, of all runs or of one, by their sockets."""
    asked = {path: ask(path, OwnerRequest(do="look")) for path in sorted(state.glob(f"{run or '*'}/*/{NAME}"))}
    return {path: answer for path, answer in asked.items() if answer is not None}


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """An address of the socket in this folder that is never too long."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
