"""A worker's end of the control channel: what it hears while it trains."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator

import pytest

from opendiloco.workers.control import ControlMessage, CountDevices, EndInnerLoop, Hold
from opendiloco.workers.worker import ControlChannel


class Pair:
    """A channel, and the peer process's end of it."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.channel = ControlChannel(theirs)
        self.channel.start()

    def close(self) -> None:
        """The peer process is gone."""
        self._ours.close()

    def tell(self, *messages: ControlMessage) -> None:
        """Returns once the channel has heard all of them."""
        for message in (*messages, CountDevices()):
            self._ours.sendall(message.line())
        self.channel.commands.get(timeout=60)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    ends = queue.SimpleQueue[int]()
    monkeypatch.setattr("opendiloco.workers.worker.os._exit", ends.put)
    pair = Pair()
    yield pair
    pair.close()
    assert ends.get(timeout=60) == 0  # or the thread would end the tests, once `_exit` is the real one again


def test_a_training_is_held_until_the_pause_is_over(pair: Pair) -> None:
    assert not pair.channel.is_held(1)
    pair.tell(Hold(held=True))
    assert pair.channel.is_held(1)
    pair.tell(Hold(held=False))
    assert not pair.channel.is_held(1)


def test_a_training_that_is_to_end_is_not_held(pair: Pair) -> None:
    pair.tell(Hold(held=True), EndInnerLoop(number=1))
    assert not pair.channel.is_held(1)
    assert pair.channel.is_held(2)
