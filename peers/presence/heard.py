"""What one peer has heard of all peers of a run: of each the newest heartbeat, and the newest sign of life.

Nothing is taken in that does not prove itself, and nothing older than what is here. Whatever is new gets the next
*serial*, so that what somebody lacks is all that has a higher serial than the last that it was told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from peers.errors import RemoteProtocolError
from peers.presence.heartbeat import DEFAULT_LIFETIME, Heartbeat, PeerState
from peers.presence.life_signs import SLOT, LifeSign, leads_to, salt_of, tag_of
from peers.presence.voice import URGENT, longest_silence

PEERS_LIMIT = 10_000  # that are remembered at most
CLOCK_TOLERANCE = 60.0  # seconds that a peer's clock may be ahead of ours
HEARTBEATS_AT_ONCE = 4.0  # that one peer may utter one after another
SECONDS_PER_HEARTBEAT = 0.5  # in the long run: what everybody is told must not be more
HEARTBEAT_BYTES = 1024  # that count as one heartbeat; a larger one counts as several
HASTE = 3.0  # times as fast as the number of peers allows may anybody speak; what comes sooner is not told on
NO_TAG = b""
NOBODY = "nobody"  # the source of what was put together from what several peers have told


@dataclass(eq=False)
class Word:
    """The newest that was heard of one peer."""

    heartbeat: Heartbeat
    signed: bytes
    sign: LifeSign
    """What to tell others; without a chain, its tag is `NO_TAG`."""
    salt: bytes
    source: str
    """The peer that told us first, and need not be told; "" where it was found in the DHT."""
    serial: int
    began: int
    """The serial with which the heartbeat came."""
    at: float
    """When this was heard, on our clock."""
    first_at: float
    """When anything was heard first."""
    allowance: float = HEARTBEATS_AT_ONCE
    """Heartbeats that it may still utter at once, as of `allowed_at`."""
    allowed_at: float = 0.0
    _dated: Heartbeat | None = field(default=None, repr=False)

    @property
    def slots(self) -> int:
        """How many slots of its chain its peer was alive, as the heartbeat or the sign of life proves."""
        seal = self.heartbeat.seal
        return max(self.sign.slots, (self.heartbeat.sequence - seal.since) // SLOT) if seal else 0

    @property
    def sequence(self) -> int:
        """Grows with each sign of life, and with a farewell. A heartbeat that comes later than a sign of the same slot
        is not newer: that its peer lives was known."""
        seal = self.heartbeat.seal
        if seal is None:
            return self.heartbeat.sequence
        return seal.since + self.slots * SLOT + (self.heartbeat.state is PeerState.LEAVING)

    @property
    def newest(self) -> Heartbeat:
        """The heartbeat, with the sequence of the newest sign of life."""
        sequence = self.sequence
        if self._dated is None or self._dated.sequence != sequence:
            self._dated = self.heartbeat.model_copy(update={"sequence": sequence})
        return self._dated

    def is_fresh(self, now: float) -> bool:
        """Whether it is recent enough to be told to others."""
        return now - self.at <= self.heartbeat.lifetime

    def is_present(self, now: float) -> bool:
        """Whether its peer seems to be there, so that it can be told something."""
        return now - self.at <= self.heartbeat.lifetime / 2 and self.heartbeat.state is not PeerState.LEAVING


class Heard:
    """The newest word of each peer of one run. Clocks are given in seconds: `now` is ours alone, `wall` everybody's."""

    def __init__(self, run: str, first_serial: int) -> None:
        """`first_serial` must be larger than any serial before a restart."""
        self.run = run
        self.lifetime = DEFAULT_LIFETIME
        """Seconds, of heartbeats in this run: whoever names another one is heard no more often for it."""
        self.serial = self.first_serial = first_serial
        self._words: dict[str, Word] = {}  # in the order of their serials
        self._by_tag: dict[bytes, Word] = {}

    def __len__(self) -> int:
        return len(self._words)

    def get(self, peer: str) -> Word | None:
        return self._words.get(peer)

    def by_tag(self, tag: bytes) -> Word | None:
        """Return the word of the peer whose chain has this tag."""
        return self._by_tag.get(tag)

    def fresh(self, now: float) -> Iterator[Word]:
        """Return what was heard lately enough to be told to others, in the order of serials."""
        return (word for word in self._words.values() if word.is_fresh(now))

    def after(self, serial: int, now: float, most: int) -> list[Word]:
        """Return what is newer than a serial and fresh, the oldest first."""
        newer = []
        for word in reversed(self._words.values()):
            if word.serial <= serial:
                break
            if word.is_fresh(now):
                newer.append(word)
        return newer[::-1][:most]

    def all_heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of every peer that is remembered."""
        return [word.heartbeat for word in self._words.values()]

    def drop(self, peer: str) -> None:
        """Forget a peer at once."""
        word = self._words.pop(peer, None)
        if word is not None:
            self._by_tag.pop(word.sign.tag, None)

    # Taking in ------------------------------------------------------------------------------------------------
    def word_of(self, signed: bytes, slots: int, link: bytes, source: str, now: float) -> Word:
        """Return what a heartbeat says, and the newest link of its chain (`slots` 0: there is none).

        Raises: RemoteProtocolError when it does not prove itself.
        """
        heartbeat = Heartbeat.verify(signed, self.run)
        seal = heartbeat.seal
        if seal is None:
            return Word(heartbeat, signed, LifeSign(NO_TAG, 0, 0, b""), b"", source, 0, 0, now, now)
        tag, salt = tag_of(heartbeat.peer, seal), salt_of(heartbeat.peer, seal.since)
        known = self._by_tag.get(tag)
        proven = known.sign if known else LifeSign(tag, 0, seal.number, seal.link)
        if slots <= proven.slots:
            sign = proven._replace(number=seal.number)
            source = NOBODY if slots < proven.slots else source
        elif leads_to(link, slots - proven.slots, proven.link, salt):
            sign = LifeSign(tag, slots, seal.number, link)
        else:
            raise RemoteProtocolError(heartbeat.peer, "a sign of life that does not lead to the seal of its heartbeat")
        return Word(heartbeat, signed, sign, salt, source, 0, 0, now, now)

    def take(self, word: Word, wall: float) -> bool:
        """Take in a word that was just heard. Returns whether it was news."""
        known = self._words.get(word.heartbeat.peer)
        if not _is_of_our_time(word, wall):
            return False
        if known is None:
            return self._has_room(wall) and self._put(word)
        if word.heartbeat.sequence <= known.heartbeat.sequence:
            is_later = word.sign.tag == known.sign.tag and word.sign.slots > known.sign.slots
            return is_later and self._advance(known, word.sign, word.source, word.at, wall)
        if known.sign.tag != word.sign.tag and word.heartbeat.sequence <= known.sequence:
            return False
        if self._is_allowed(known, word):
            return self._replace(known, word)
        is_later = word.sign.tag == known.sign.tag and word.sign.slots > known.sign.slots
        return is_later and self._advance(known, word.sign, word.source, word.at, wall)

    def _is_allowed(self, known: Word, word: Word) -> bool:
        """Whoever utters heartbeats faster than anybody needs to is heard now and then, so that it can't have a whole
        swarm pass on what it says."""
        is_farewell = PeerState.LEAVING is word.heartbeat.state is not known.heartbeat.state
        period = max(SECONDS_PER_HEARTBEAT, URGENT * len(self._words) / HASTE)
        allowance = min(HEARTBEATS_AT_ONCE, known.allowance + (word.at - known.allowed_at) / period)
        cost = min(HEARTBEATS_AT_ONCE, max(1.0, len(word.signed) / HEARTBEAT_BYTES))
        if not is_farewell and allowance < cost:
            return False
        word.allowance, word.allowed_at = max(0.0, allowance - cost), word.at
        return True

    def _replace(self, known: Word, word: Word) -> bool:
        word.first_at = known.first_at
        if word.sign.tag == known.sign.tag != NO_TAG and word.slots <= known.slots:
            word.at = known.at  # what it says is news, that it lives is not
        del self._words[word.heartbeat.peer]
        self._by_tag.pop(known.sign.tag, None)
        return self._put(word)

    def _put(self, word: Word) -> bool:
        self.serial += 1
        word.serial = word.began = self.serial
        self._words[word.heartbeat.peer] = word
        if word.sign.tag != NO_TAG:
            self._by_tag[word.sign.tag] = word
        return True

    def confirm(self, sign: LifeSign, source: str, now: float, wall: float) -> bool:
        """Take in a sign of life of a chain that is known. Returns whether that was news.

        Raises: KeyError for another chain, RemoteProtocolError when the sign is not its owner's.
        """
        word = self._by_tag[sign.tag]
        steps = sign.slots - word.sign.slots
        if steps <= 0:
            return False
        if not leads_to(sign.link, steps, word.sign.link, word.salt):
            raise RemoteProtocolError(source or word.heartbeat.peer, "a sign of life that is not its owner's")
        return self._advance(word, sign, source, now, wall)

    def _advance(self, word: Word, sign: LifeSign, source: str, now: float, wall: float) -> bool:
        before, slots = word.sign, word.slots
        if (sign.slots - before.slots) * SLOT < 1000 * longest_silence(len(self._words), self.lifetime) / HASTE:
            return False
        word.sign = sign._replace(number=before.number)
        if not _is_of_our_time(word, wall):
            word.sign = before
            return False
        if word.slots > slots:  # else its heartbeat has told us so before, and others may not have that
            word.at = now
        self.serial += 1
        word.source = NOBODY if sign.number < before.number else source
        word.serial = self.serial
        self._words[word.heartbeat.peer] = self._words.pop(word.heartbeat.peer)
        return True

    # Bounds ---------------------------------------------------------------------------------------------------
    def _has_room(self, wall: float) -> bool:
        """Whether a peer more can be remembered, if need be in the place of others that are long gone."""
        if len(self._words) >= PEERS_LIMIT:
            self.forget(wall)
        return len(self._words) < PEERS_LIMIT

    def forget(self, wall: float) -> None:
        """Drop what is so old that it could not be taken in again. Before that nobody is forgotten, so that old news
        does not go around for ever."""
        for word in [word for word in self._words.values() if not _is_of_our_time(word, wall)]:
            del self._words[word.heartbeat.peer]
            self._by_tag.pop(word.sign.tag, None)


def _is_of_our_time(word: Word, wall: float) -> bool:
    """Whether it is neither from the future, nor so old that its peer may be gone for long."""
    said = word.sequence / 1000
    return said - CLOCK_TOLERANCE <= wall <= said + word.heartbeat.lifetime + CLOCK_TOLERANCE
