"""The chunks that are under way to one member: a connection that hangs should hold up no round."""

from __future__ import annotations

from collections.abc import Callable

from peers.protocol.effects import SendChunk

Key = tuple[int, bool]
"""A chunk's number, and whether it is averaged."""


class Flights:
    """When each was sent, and on which stream. Where TCP waits for a lost packet, one of several connections may stand
    still for seconds, while the others have nothing left to send."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: dict[Key, tuple[float, object, SendChunk]] = {}  # the one that was sent first comes first

    def begin(self, send: SendChunk, stream: object) -> None:
        """A chunk is sent on a stream, maybe once more."""
        self._sent.pop((send.chunk, send.reduced), None)
        self._sent[send.chunk, send.reduced] = self._clock(), stream, send

    def end(self, send: SendChunk) -> bool:
        """A chunk was answered. Returns whether it was not before, on another stream."""
        return self._sent.pop((send.chunk, send.reduced), None) is not None

    def late(self, stream: object, patience: float) -> SendChunk | None:
        """Return what has been under way for longer than that on another stream, if anything has."""
        latest = self._clock() - patience
        return next((send for at, other, send in self._sent.values() if at < latest and other is not stream), None)
