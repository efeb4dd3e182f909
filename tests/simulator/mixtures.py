"""Lies made of what others have said: replays, and messages with fields of other messages."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from pydantic import ValidationError

from peers.log.certificate import Ballot
from peers.messages.messages import Message, Unread
from peers.protocol.peer import Peer
from peers.values.identity import Keys
from peers.values.wire import from_plain
from tests.simulator.liars import Lie, Said, invented

KEPT = 200
"""Messages that a liar remembers."""
NUMBERS = (0, 1, 2, 7, 2**32, 2**61, 2**62 - 1)


class Replays(Lie):
    """It says again what was said long ago, by itself or another."""

    def __init__(self, peer: Peer, keys: Keys, draw: random.Random, allies: Sequence[str] = ()) -> None:
        super().__init__(peer, keys, draw, allies)
        self.kept: deque[Message] = deque(maxlen=KEPT)

    def says(self, to: str, message: Message) -> Said:
        self.kept.append(message)
        yield to, message

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if not isinstance(message, Unread):
            self.kept.append(message)
        yield from ()

    def volunteers(self) -> Said:
        for _ in range(self.draw.randint(0, 3) if self.kept else 0):
            message = self.changed(self.draw.choice(self.kept))
            for peer in self.draw.sample(self.others, self.draw.randint(0, len(self.others))):
                yield peer, message

    def changed(self, message: Message) -> Message:
        """Return what is said in place of an old message."""
        return message


class Mixtures(Replays):
    """It says what others have said, with some fields replaced by those of other messages, or by invented ones."""

    def says(self, to: str, message: Message) -> Said:
        self.kept.append(message)
        yield to, self.changed(message) if self.draw.random() < 0.3 else message

    def changed(self, message: Message) -> Message:
        """Return the same with one or two other fields; as it is, if that can be no message."""
        names = list(type(message).model_fields)
        fields = {name: getattr(message, name) for name in names}
        for name in self.draw.sample(names, min(len(names), self.draw.randint(1, 2))):
            fields[name] = self._another(name, fields[name])
        try:
            return from_plain(type(message), fields)
        except (ValidationError, ValueError):
            return message

    def _another(self, name: str, value: object) -> object:
        said = [getattr(one, name) for one in self.kept if name in type(one).model_fields]
        if isinstance(value, bool):
            return self.draw.choice((True, False))
        if isinstance(value, int):
            return self.draw.choice((*NUMBERS, value + 1))
        if isinstance(value, bytes) and self.draw.random() < 0.5:
            return (2 * invented(value))[: len(value)]
        if isinstance(value, Ballot) and self.draw.random() < 0.5:
            return Ballot(view=value.view + self.draw.choice((0, 1, 1000)), attempt=self.draw.choice(NUMBERS))
        if isinstance(value, tuple) and self.draw.random() < 0.5:
            return tuple(self.draw.sample(value, self.draw.randint(0, len(value))))
        return self.draw.choice(said)
