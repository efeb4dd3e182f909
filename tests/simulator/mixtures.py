"""Lies made of what others have said: replays, invented commits, and messages with fields of other messages."""

from __future__ import annotations

import random
from collections import deque

from pydantic import ValidationError

from peers.log.certificate import Certificate, certify, electorate
from peers.log.header import Header
from peers.protocol.messages import Commit, Message, Unread
from peers.protocol.rounds import Attempt
from peers.values.wire import from_plain
from tests.simulator.liars import Lie, Means, Said, invented

KEPT = 200
"""Messages that a liar remembers."""
NUMBERS = (0, 1, 2, 7, 2**32, 2**61, 2**62 - 1)


class Memory(Lie):
    """It remembers what was said, by itself and to it."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        self.kept: deque[Message] = deque(maxlen=KEPT)

    def says(self, to: str, message: Message) -> Said:
        self.kept.append(message)
        yield to, message

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if not isinstance(message, Unread):
            self.kept.append(message)
        yield from ()

    def to_some(self, message: Message) -> Said:
        """The same to a few of the others."""
        others = self.liar.others
        yield from ((peer, message) for peer in self.draw.sample(others, self.draw.randint(0, len(others))))


class Replays(Memory):
    """It says again what was said long ago, by itself or another."""

    def volunteers(self) -> Said:
        for _ in range(self.draw.randint(0, 3) if self.kept else 0):
            yield from self.to_some(self.draw.choice(self.kept))


class Mixtures(Memory):
    """It says what others have said, with some fields replaced by those of other messages, or by invented ones."""

    def volunteers(self) -> Said:
        for _ in range(self.draw.randint(0, 3) if self.kept else 0):
            yield from self.to_some(self._mixed(self.draw.choice(self.kept)))

    def says(self, to: str, message: Message) -> Said:
        self.kept.append(message)
        yield to, self._mixed(message) if self.draw.random() < 0.3 else message

    def _mixed(self, message: Message) -> Message:
        """The same with one or two other fields; as it is, if that can be no message."""
        names = list(type(message).model_fields)
        fields = {name: getattr(message, name) for name in names}
        for name in self.draw.sample(names, min(len(names), self.draw.randint(1, 2))):
            fields[name] = self._another(name, fields[name])
        try:
            return from_plain(type(message), fields)
        except (ValidationError, ValueError):
            return message

    def _another(self, name: str, value: object) -> object:
        told = [getattr(one, name) for one in self.kept if name in type(one).model_fields]
        if isinstance(value, bool):
            return self.draw.choice((True, False))
        if isinstance(value, int):
            return self.draw.choice((*NUMBERS, value + 1))
        if isinstance(value, bytes) and self.draw.random() < 0.5:
            return (2 * invented(value))[: len(value)]
        if isinstance(value, Attempt) and self.draw.random() < 0.5:
            return value.model_copy(update={"number": value.number + self.draw.choice((-1, 1, 1000))})
        if isinstance(value, tuple) and self.draw.random() < 0.5:
            return tuple(self.draw.sample(value, self.draw.randint(0, len(value))))
        return self.draw.choice(told)


class UnaskedCommits(Lie):
    """It commits entries of its own making, with no certificate, or one that is false, or has too few signatures."""

    def __init__(self, liar: Means, draw: random.Random) -> None:
        super().__init__(liar, draw)
        self._seen: list[Certificate] = []

    def hears(self, sender: str, message: Message | Unread) -> Said:
        if isinstance(message, Commit) and message.certificate is not None:
            self._seen = [*self._seen[-9:], message.certificate]
        yield from ()

    def volunteers(self) -> Said:
        if self.draw.random() < 0.2:
            header = self.liar.entry_of_its_own()
            commit = Commit(header=header, certificate=self._certificate(header))
            yield from ((peer, commit) for peer in self.liar.others)

    def _certificate(self, header: Header) -> Certificate | None:
        liar, log = self.liar, self.liar.log.of(header.fragment)
        attempt = Attempt(position=log.position, number=7, leader=liar.name, alone=self.draw.random() < 0.5)
        voters = [peer for peer, _ in electorate(log, header)]
        allies = {peer: liar.sign(header, attempt, peer) for peer in voters if peer in liar.allies}
        false = {peer: 2 * invented(peer) for peer in voters} | allies
        made = [certify(log, header, attempt.name, signatures, {}) for signatures in (allies, false)]
        return self.draw.choice([None, *made, *self._seen])


MIXED_LIES: dict[str, type[Lie]] = {
    "replays": Replays,
    "mixtures": Mixtures,
    "unasked commits": UnaskedCommits,
}
