"""The chunks that are under way to one member: a connection that hangs should hold up no round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peers.protocol.effects import SendChunk

Key = tuple[int, bool]
"""A chunk's number, and whether it is averaged."""
LATE = 2.0  # times as long as chunks took before: that is late
MEMORY = 0.25  # of how long they took, that the last one decides


@dataclass(frozen=True)
class Flight:
    """A chunk that is not answered: when it was sent first, and last; on which stream, and how often."""

    first: float
    last: float
    stream: object
    times: int
    send: SendChunk


class Flights:
    """When each was sent, and on which stream. Where TCP waits for a lost packet, one of several connections may stand
    still for seconds, while the others have nothing left to send.

    Where all chunks take long, none of them hangs: a member whose link is slow, or shared by many, would be sent
    everything twice, and take twice as long.
    """

    def __init__(self, clock: Callable[[], float], usual: float = 0.0) -> None:
        self.usual = usual
        """Seconds from when a chunk is sent until it is answered; 0: not known."""
        self._clock = clock
        self._flights: dict[Key, Flight] = {}  # the one that was sent first comes first

    def begin(self, send: SendChunk, stream: object) -> None:
        """A chunk is sent on a stream, maybe once more."""
        now, before = self._clock(), self._flights.pop((send.chunk, send.reduced), None)
        first, times = (before.first, before.times + (before.stream is not stream)) if before else (now, 1)
        self._flights[send.chunk, send.reduced] = Flight(first, now, stream, times, send)

    def end(self, send: SendChunk) -> bool:
        """A chunk was answered. Returns whether it was not before, on another stream."""
        flight = self._flights.pop((send.chunk, send.reduced), None)
        if flight is None:
            return False
        took = self._clock() - flight.first
        self.usual = self.usual + MEMORY * (took - self.usual) if self.usual else took
        return True

    def late(self, stream: object, patience: float) -> SendChunk | None:
        """Return what has been under way on another stream for longer than that, and than is usual; for twice as long
        each time, so that no link that has become slow is filled with what is there already.

        It is this stream's from now on: others that look, too, before it is sent, would send it as well.
        """
        now, limit = self._clock(), max(patience, LATE * self.usual)
        for flight in self._flights.values():
            if flight.stream is not stream and now - flight.last > limit * 2 ** (flight.times - 1):
                self.begin(flight.send, stream)
                return flight.send
        return None
