"""Gossip: how the peers of a run tell each other who is there, without input or output.

Each peer keeps up exchanges with a few partners (`Partners`). In an exchange both sides tell what the other one may
lack: signs of life, and whole heartbeats where these are asked for. Whatever proves itself is told on, so that news is
everywhere after as many exchanges as the logarithm of the number of peers. Where there are few peers, each tells its
own heartbeats to all others at once.

Who answers an exchange remembers nothing of it: a request says up to which of our numbers its sender has our news.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from peers.errors import RemoteProtocolError
from peers.presence.admission import RunAdmission, refused
from peers.presence.allowances import Allowances
from peers.presence.copies import Copies
from peers.presence.heard import HEARTBEATS_AT_ONCE, NO_TAG, Heard, Word
from peers.presence.heartbeat import Heartbeat
from peers.presence.life_signs import LifeSign
from peers.presence.news import HEARTBEATS_LIMIT, SIGNS_LIMIT, WHOLES_LIMIT, News, Request, Whole
from peers.presence.partners import Partners
from peers.values.wire import pack

CLOSE = 16  # other peers at most, for each to tell its heartbeats to all of them
PERIOD = 0.25  # seconds between two exchanges with one partner
SLOW = 0.75  # seconds without an answer after which a partner has a stand-in
CLOSE_PERIOD = 0.5  # seconds, where all tell all of themselves
COUNT_PERIOD = 1.0  # seconds between two looks at who seems to be there
LATELY = 1.0  # seconds; whoever took part in an exchange since has missed nothing
IDLE_PERIOD = 2.0  # seconds, when there is nothing to tell
ANSWER_PERIOD = 1.5  # seconds for which nobody else is asked for the same heartbeat
ASKED_LIMIT = 4096
EXCHANGE_BURST, EXCHANGE_RATE = 1 << 19, 1 << 16  # bytes, and bytes a second, that one peer may have us hear and answer
TOGETHER = 4  # times that, for all peers together
FROM_DHT = ""  # the source of what no peer has told us
BUSY = b""
NOTHING = 2**62 - 1  # the serial after which whoever knocks wants to be told
STRANGER = "stranger"  # all who are not in the run share what one peer may have


@dataclass
class Exchanges:
    """Where we are with one peer that we tell things."""

    told: int = 0
    """The number of ours up to which it was told everything."""
    heard: int = 0
    """The number of its own up to which it has told us everything."""
    telling: int = 0
    """What `told` will be once it answers."""
    is_under_way: bool = False
    begun: float = 0.0
    due: float = 0.0
    has: dict[str, LifeSign] = field(default_factory=dict)
    """What it told us last, of each peer of which that was no news."""
    wanted: dict[bytes, int] = field(default_factory=dict)
    """Tags of chains of which it has newer heartbeats than we, and their numbers."""
    owed: tuple[bytes, ...] = ()
    """Tags of chains whose heartbeats it has asked for."""


class Gossip:
    """One peer's part in the gossip of one run. Every method that is given `now` may change what is `due`."""

    def __init__(self, me: str, run: str, seed: bytes, wall: float) -> None:
        """`seed`: what nobody else knows, so that nobody can foresee whom we choose."""
        self.me = me
        self.heard = Heard(run, int(wall * 1000))
        self.own: Word | None = None
        self.partners = Partners(seed, self.known_since)
        self.answered_at = -float("inf")
        """When another peer last took part in an exchange with us."""
        self.copies = Copies()
        self.admission: RunAdmission | None = None
        """Admission to the run; None: it is open."""
        self._others: list[str] = []
        self._counted = 0
        self._counted_at = -float("inf")
        self._exchanges: defaultdict[str, Exchanges] = defaultdict(Exchanges)
        self._asked: dict[bytes, float] = {}
        self._allowances = Allowances(EXCHANGE_BURST, EXCHANGE_RATE, TOGETHER)

    # What is known --------------------------------------------------------------------------------------------
    def say(self, signed: bytes | None, sign: LifeSign | None, now: float, wall: float) -> None:
        """Tell a heartbeat of our own from now on, or a sign of life, or both."""
        if self.own is not None:
            self.own.allowance = HEARTBEATS_AT_ONCE
        if signed is not None:
            self.heard.take(self.heard.word_of(signed, 0, b"", self.me, now), wall)
        # A sign of another chain comes when our clock was set: then the next heartbeat is whole.
        if sign is not None and self.heard.by_tag(sign.tag) is not None:
            self.heard.confirm(sign, self.me, now, wall)
        self.own = self.heard.get(self.me)
        if self.own is not None:
            self.copies.ours = self.own.heartbeat.incarnation
            self.heard.lifetime = self.own.heartbeat.lifetime

    def found(self, signed: bytes, now: float, wall: float) -> bool:
        """Take in what lies in the DHT. Returns whether it was news. Raises: RemoteProtocolError."""
        return self._hear(self.heard.word_of(signed, 0, b"", FROM_DHT, now), wall)

    def _hear(self, word: Word, wall: float) -> bool:
        """Take in a heartbeat. Of ourselves we know better, but for what another machine says with our key."""
        self._asked.pop(word.sign.tag, None)
        heartbeat = word.heartbeat
        if heartbeat.peer == self.me:
            self.copies.hear(word.newest, word.at)
            return False
        return not self._refusal(heartbeat, wall) and self.heard.take(word, wall)

    def _refusal(self, heartbeat: Heartbeat, wall: float) -> str:
        """Return why a peer may not take part; empty: it may."""
        return self.admission.admit(heartbeat.peer, heartbeat.ticket, wall) if self.admission else ""

    def see_out(self, wall: float) -> None:
        """Forget those who may not take part any more: their tickets were revoked, or are expired."""
        if self.admission is not None:
            out = [one for one in self.heard.all_heartbeats() if one.peer != self.me and self._refusal(one, wall)]
            for heartbeat in out:
                self.heard.drop(heartbeat.peer)

    def heartbeats(self, now: float) -> list[Heartbeat]:
        """Return the newest of every peer, by peer id."""
        return sorted((word.newest for word in self.heard.fresh(now)), key=lambda heartbeat: heartbeat.peer)

    def silences(self, now: float) -> dict[str, float]:
        """Return for how many seconds nothing new was heard of each peer."""
        return {word.heartbeat.peer: now - word.at for word in self.heard.fresh(now)}

    def known_since(self, peer: str) -> float:
        """Return when anything was heard of a peer first."""
        word = self.heard.get(peer)
        return word.first_at if word else 0.0

    def others(self, now: float) -> list[str]:
        """Return the other peers that seem to be there; they are counted anew each second, and when one is new."""
        if len(self.heard) != self._counted or now - self._counted_at >= COUNT_PERIOD:
            self._counted, self._counted_at = len(self.heard), now
            words = (word for word in self.heard.fresh(now) if word.is_present(now))
            self._others = [word.heartbeat.peer for word in words if word.heartbeat.peer != self.me]
        return self._others

    # Whom to tell ---------------------------------------------------------------------------------------------
    def due(self, now: float) -> list[str]:
        """Return the peers with which an exchange is due now; each is to be followed by `request`."""
        others = self.others(now)
        self.partners.choose(others, lambda peer: self._is_slow(peer, now), now)
        audience = dict.fromkeys((*self.partners.chosen, *(others if len(others) <= CLOSE else ())))
        for peer in self._exchanges.keys() - audience.keys():
            if not self._exchanges[peer].is_under_way:
                del self._exchanges[peer]
        return [peer for peer in audience if self._is_due(peer, now)]

    def _is_due(self, peer: str, now: float) -> bool:
        exchanges = self._exchanges[peer]
        if exchanges.is_under_way or self.partners.is_paused(peer, now):
            return False
        if self.own is not None and self.own.serial > exchanges.told:
            return True
        if peer not in self.partners.chosen:
            return False
        is_asked = bool(exchanges.wanted or exchanges.owed)
        if now < exchanges.due:
            return is_asked and self.own is None  # whoever only looks wants to be done
        return is_asked or now >= exchanges.due + IDLE_PERIOD or self._has_news_for(peer, exchanges, now)

    def _has_news_for(self, peer: str, exchanges: Exchanges, now: float) -> bool:
        return any(
            self._lacks(peer, word, exchanges.has) for word in self.heard.after(exchanges.told, now, SIGNS_LIMIT)
        )

    def _is_slow(self, peer: str, now: float) -> bool:
        exchanges = self._exchanges.get(peer)
        return exchanges is not None and exchanges.is_under_way and now - exchanges.begun > SLOW

    # Exchanges that we begin ----------------------------------------------------------------------------------
    def request(self, peer: str, now: float) -> bytes:
        """Begin an exchange: what to send to the peer. `answer_of` or `failed` ends it."""
        exchanges = self._exchanges[peer]
        exchanges.is_under_way, exchanges.begun = True, now
        exchanges.due = now + (PERIOD if len(self._others) > CLOSE else CLOSE_PERIOD)
        owed, exchanges.owed = exchanges.owed, ()
        if self._is_only_to_knock(exchanges, now):
            own = (_whole(self.own),) if self.own is not None else ()
            news, after = News(self.heard.serial, wholes=own), NOTHING
        else:
            asked = self._ask(exchanges.wanted, now)
            news, after = self._news(peer, exchanges.told, exchanges.has, owed, asked, now), exchanges.heard
        exchanges.telling, exchanges.has = news.upto, {}
        return pack(Request(run=self.heard.run, after=after, news=news.packed))

    def _is_only_to_knock(self, exchanges: Exchanges, now: float) -> bool:
        """Whether a new partner is told nothing but who we are, and tells only what it hears from now on. Where there
        are many peers, whoever takes part in the gossip hears soon enough of all others that live, and a partner that
        is busy need not hear of them."""
        is_new = not (exchanges.told or exchanges.heard)
        takes_part = self.own is not None and now - self.answered_at < LATELY
        return is_new and takes_part and len(self._others) > CLOSE

    def answer_of(self, peer: str, packed: bytes, now: float, wall: float) -> None:
        """End an exchange with what the peer has answered. Raises: RemoteProtocolError, after which it has failed."""
        exchanges = self._exchanges.get(peer)
        if exchanges is None:
            return
        exchanges.is_under_way = False
        if packed == BUSY:
            self.failed(peer, now)
            return
        try:
            news = News.unpack(peer, packed)
            lacking = self._take(peer, news, exchanges.has, now, wall)
        except RemoteProtocolError:
            self.failed(peer, now)
            raise
        self.partners.end_pause(peer)
        self.answered_at = now
        exchanges.told, exchanges.heard = max(exchanges.told, exchanges.telling), news.upto
        exchanges.owed = news.asked
        room = ASKED_LIMIT - len(exchanges.wanted)
        exchanges.wanted.update(islice(lacking.items(), max(0, room)))
        if news.is_cut:
            exchanges.due = now

    def failed(self, peer: str, now: float) -> None:
        """End an exchange that came to nothing: the peer is left alone for a while, longer each time."""
        self._exchanges.pop(peer, None)
        self.partners.pause(peer, now)

    def _ask(self, wanted: dict[bytes, int], now: float) -> list[bytes]:
        """Return for which chains to ask now, which are then wanted no more: those of whose heartbeat nobody else was
        asked a moment ago."""
        asked = list[bytes]()
        while wanted and len(asked) < HEARTBEATS_LIMIT:
            tag, number = wanted.popitem()
            if self._is_newer(tag, number) and self._may_ask(tag, now):
                asked.append(tag)
        return asked

    def _is_newer(self, tag: bytes, number: int) -> bool:
        """Whether we lack the heartbeat with this number."""
        word = self.heard.by_tag(tag)
        return word is None or word.sign.number < number

    def _may_ask(self, tag: bytes, now: float) -> bool:
        if now - self._asked.get(tag, -ANSWER_PERIOD) < ANSWER_PERIOD:
            return False
        if len(self._asked) >= ASKED_LIMIT:
            self._asked = {one: at for one, at in self._asked.items() if now - at < ANSWER_PERIOD}
        if len(self._asked) >= ASKED_LIMIT:
            return False
        self._asked[tag] = now
        return True

    # Exchanges that others begin ------------------------------------------------------------------------------
    def answer(self, sender: str, request: Request, now: float, wall: float) -> bytes:
        """Return our answer to a peer's request, or to anybody else's who wants to know who is in the run: `BUSY`, if
        it had better ask another one.

        Raises: RemoteProtocolError; AdmissionError, when the sender has no ticket and needs one.
        """
        if request.run != self.heard.run:
            raise RemoteProtocolError(sender, f"it asks about run {request.run}, not {self.heard.run}")
        told = News.of(sender, request.news)
        is_member = self._is_member(sender, told, wall)
        account = sender if is_member else STRANGER
        if not self._allowances.has_some(account, now):
            return BUSY
        self._allowances.spend(account, told.size)
        double = self._double_of(sender, told)
        has: dict[str, LifeSign] = {}
        lacking = self._take(sender, told, has, now, wall)
        if is_member:
            if len(self.others(now)) > CLOSE and not self.partners.has_place_for(sender, now):
                return BUSY  # what it has told us counts all the same
            self.partners.end_pause(sender)
            self.answered_at = now
        wanted = self._ask(lacking, now) if is_member else []
        is_ours = self.heard.first_serial <= request.after <= self.heard.serial
        after = request.after if is_ours else self.heard.serial if request.after == NOTHING else 0
        news = self._news(sender, after, has, told.asked, wanted, now)
        if double is not None:
            news = news._replace(wholes=(double, *news.wholes[: WHOLES_LIMIT - 1]))
        answer = news.pack()
        self._allowances.spend(account, len(answer))
        return answer

    def _double_of(self, sender: str, told: News) -> Whole | None:
        """Return what we have of the sender, if it may not have said that itself: it has just begun and says nothing of
        itself yet, or speaks in another incarnation."""
        known = self.heard.get(sender)
        if known is None or (told.signs and not told.wholes):
            return None
        own = Heartbeat.verify(told.wholes[0].signed, self.heard.run) if told.wholes else None
        is_same = own is not None and (own.peer != sender or own.incarnation == known.heartbeat.incarnation)
        return None if is_same else _whole(known)

    def _is_member(self, sender: str, told: News, wall: float) -> bool:
        """Whether a peer says, or has said, who it is in this run. Its own heartbeat comes first.

        Raises: AdmissionError, when it has no ticket and needs one.
        """
        if self.heard.get(sender) is not None:
            return True
        own = Heartbeat.verify(told.wholes[0].signed, self.heard.run) if told.wholes else None
        is_own = own is not None and own.peer == sender
        ticket = own.ticket if own is not None and is_own else b""
        if self.admission is not None and (reason := self.admission.admit(sender, ticket, wall)):
            raise refused(sender, self.heard.run, reason)
        return is_own

    # Both -----------------------------------------------------------------------------------------------------
    def _lacks(self, peer: str, word: Word, has: dict[str, LifeSign]) -> bool:
        """Whether a peer may not know a word yet. Nobody needs to be told of itself."""
        subject, sign = word.heartbeat.peer, word.sign
        if peer in (word.source, subject):
            return False
        told = has.get(subject)
        return told is None or told.tag != sign.tag or told.slots < sign.slots or told.number < sign.number

    def _news(
        self, peer: str, after: int, has: dict[str, LifeSign], owed: Sequence[bytes], asked: Sequence[bytes], now: float
    ) -> News:
        """Return what a peer may lack of what came after a serial, with the heartbeats that it has asked for."""
        words = self.heard.after(after, now, SIGNS_LIMIT)
        is_cut = len(words) == SIGNS_LIMIT
        upto = words[-1].serial if is_cut else self.heard.serial
        lacking = [word for word in words if self._lacks(peer, word, has)]
        whole = [word for word in lacking if word is self.own and word.began > after]
        whole += [word for tag in owed if (word := self.heard.by_tag(tag)) and word.is_fresh(now)]
        whole += [word for word in lacking if word.sign.tag == NO_TAG]
        wholes = dict.fromkeys(whole[:WHOLES_LIMIT])
        signs = [word.sign for word in lacking if word not in wholes and word.sign.tag != NO_TAG]
        return News(upto, is_cut, tuple(signs), tuple(asked), tuple(map(_whole, wholes)))

    def _take(self, sender: str, news: News, has: dict[str, LifeSign], now: float, wall: float) -> dict[bytes, int]:
        """Take in what a peer tells, note what of it we knew, and return the chains of which it has newer heartbeats.

        Raises: RemoteProtocolError.
        """
        for whole in news.wholes:
            told = self.heard.word_of(whole.signed, whole.slots, whole.link, sender, now)
            if not self._hear(told, wall) and told.sign.tag != NO_TAG:
                has[told.heartbeat.peer] = told.sign._replace(slots=whole.slots)
        lacking = dict[bytes, int]()
        for sign in news.signs:
            word = self.heard.by_tag(sign.tag)
            if word is None or word.sign.number < sign.number:
                lacking[sign.tag] = sign.number
            if word is not None and not self.heard.confirm(sign, sender, now, wall):
                has[word.heartbeat.peer] = sign
        return lacking


def _whole(word: Word) -> Whole:
    return Whole(signed=word.signed, slots=word.sign.slots, link=word.sign.link)
