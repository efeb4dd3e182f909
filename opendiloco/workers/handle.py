"""The peer process's handle on one worker, wherever it runs. Knows no torch; speaks the control protocol."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from opendiloco.errors import WorkerError
from opendiloco.workers.control import (
    AtStage,
    ControlMessage,
    Failed,
    MomentsMoved,
    MoveMoments,
    Reply,
    Report,
    parse_reply,
)
from opendiloco.workers.failures import rebuild
from peers.errors import DilocoPeerError
from peers.values.workload import SnapshotError

if TYPE_CHECKING:
    from opendiloco.workers.nodes import Node

Answer = TypeVar("Answer", bound=ControlMessage)


class WorkerDeathError(WorkerError):
    """The worker's process has ended."""


class WorkerHandle(ABC):
    """A running worker: takes one request at a time, and moves of moments beside it."""

    node: Node | None = None
    """The machine that it is on, unless that is this one."""

    def __init__(self) -> None:
        self.name = "the worker"
        self.on_stage: Callable[[str, float | None], None] = lambda stage, share: None
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._moments_replies: asyncio.Queue[MomentsMoved | None] = asyncio.Queue()
        self._death: asyncio.Future[DilocoPeerError] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def write(self, message: ControlMessage) -> None:
        """What is written to a dead worker is lost without an error; its death is what the caller then waits for."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once, without waiting for its end."""

    @abstractmethod
    async def close(self) -> None:
        """End the worker. Leaves no process behind."""

    async def exchange(
        self, command: ControlMessage, answer: type[Answer], on_report: Callable[[Report], None]
    ) -> Answer:
        """Send a command and wait for its answer. Must not be cancelled, or the next command gets this one's answer.

        Raises: the worker's error as one of ours; WorkerError when it dies.
        """
        self.write(command)
        while True:
            reply = await self._next_reply()
            if isinstance(reply, Report):
                on_report(reply)
            elif isinstance(reply, Failed):
                raise rebuild(reply)
            elif isinstance(reply, answer):
                return reply
            else:
                raise WorkerError(f"the worker answered {command} with {reply}.", "This is a bug; report it.")

    async def move_moments(self, command: MoveMoments) -> MomentsMoved:
        """Return which bytes the worker has written. Also while it answers another command. One at a time.

        Raises: SnapshotError when they cannot be moved; WorkerError when it dies.
        """
        self.write(command)
        reply = await self._moments_replies.get()
        if reply is None:
            self._moments_replies.put_nowait(None)
            raise self._death.result()
        if reply.problem is not None:
            raise SnapshotError(reply.problem)
        return reply

    async def wait_for_death(self) -> DilocoPeerError:
        """Returns what to raise once the worker is dead."""
        return await asyncio.shield(self._death)

    def hear(self, line: bytes) -> None:
        """Take a line of the worker's. Raises: pydantic.ValidationError when it is none of the protocol's."""
        reply = parse_reply(line)
        if isinstance(reply, AtStage):
            self.on_stage(reply.stage, reply.share)
        elif isinstance(reply, MomentsMoved):
            self._moments_replies.put_nowait(reply)
        else:
            self._replies.put_nowait(reply)

    def end(self, death: DilocoPeerError) -> None:
        """The worker is dead: `death` is what everybody gets who waits for it."""
        if not self._death.done():
            self._death.set_result(death)
            self._replies.put_nowait(None)
            self._moments_replies.put_nowait(None)

    async def _next_reply(self) -> Reply:
        reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
            raise self._death.result()
        return reply
