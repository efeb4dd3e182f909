"""With whom one peer gossips: partners of its own, chosen by chance, and the callers whose partner it is."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from peers.values.wire import digest_of

PARTNERS = 3
TERM = 15.0  # seconds after which one of the partners is replaced
CALLERS = 8  # peers at most, where there are many, of which we are a partner: some of all can call and not be called
CALLER_TERM = 3.0  # seconds without an exchange after which one of them is none any more
PAUSE_FIRST, PAUSE_LAST = 1.0, 30.0  # seconds for which a peer that did not answer is left alone
PAUSES_LIMIT = 4096


class Partners:
    """The few peers that one peer keeps telling what is new, replaced one after another."""

    def __init__(self, seed: bytes, known_since: Callable[[str], float]) -> None:
        """`seed`: what nobody else knows, so that nobody can foresee whom we choose."""
        self.chosen: list[str] = []
        self.avoided: Container[str] = ()
        """Peers that are better not chosen: hard to reach, or not at all."""
        self._seed = seed
        self._known_since = known_since
        self._draws = 0
        self._replaced_at = -float("inf")
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and for how long
        self._callers: dict[str, float] = {}  # when they last called

    # Ours -----------------------------------------------------------------------------------------------------
    def choose(self, others: Sequence[str], is_slow: Callable[[str], bool], now: float) -> None:
        """Replace partners that are gone, and now and then one of the others. One that takes long to answer, and may be
        dead, has a stand-in."""
        present = set(others)
        self.chosen = [peer for peer in self.chosen if peer in present and not self.is_paused(peer, now)]
        if now - self._replaced_at > TERM and len(self.chosen) < len(others):
            del self.chosen[: len(self.chosen) + 1 - PARTNERS]
            self._replaced_at = now
        missing = PARTNERS - sum(not is_slow(peer) for peer in self.chosen)
        for _ in range(min(missing, 2 * PARTNERS - len(self.chosen))):
            rest = [peer for peer in others if peer not in self.chosen and not self.is_paused(peer, now)]
            if not rest:
                break
            self.chosen.append(self._draw([peer for peer in rest if peer not in self.avoided] or rest))

    def _draw(self, peers: list[str]) -> str:
        """Return one of the peers by chance. Every third time it is one of those that have been there for longest, so
        that whoever makes up many new peers does not get all our exchanges."""
        self._draws += 1
        if self._draws % 3 == 0:
            peers = sorted(peers, key=self._known_since)[: (len(peers) + 1) // 2]
        chance = digest_of(self._seed + self._draws.to_bytes(8, "big"))
        return peers[int.from_bytes(chance[:8], "big") % len(peers)]

    # Pauses ---------------------------------------------------------------------------------------------------
    def pause(self, peer: str, now: float) -> None:
        """Leave a peer alone for a while, longer each time."""
        _, length = self._pauses.get(peer, (0.0, PAUSE_FIRST / 2))
        length = min(PAUSE_LAST, 2 * length)
        if len(self._pauses) >= PAUSES_LIMIT:
            self._pauses = {one: pause for one, pause in self._pauses.items() if now < pause[0]}
        self._pauses[peer] = (now + length, length)

    def end_pause(self, peer: str) -> None:
        self._pauses.pop(peer, None)

    def is_paused(self, peer: str, now: float) -> bool:
        return peer in self._pauses and now < self._pauses[peer][0]

    # Others' --------------------------------------------------------------------------------------------------
    def has_place_for(self, caller: str, now: float) -> bool:
        """Whether we can be a caller's partner, where there are many peers; it is one from now on, then.

        Whoever has been known for longer comes first, so that a few made-up peers can't take the places of all others.
        """
        self._callers = {peer: at for peer, at in self._callers.items() if now - at < CALLER_TERM}
        if len(self._callers) >= CALLERS and caller not in self._callers:
            newest = max(self._callers, key=self._known_since)
            if self._known_since(newest) <= self._known_since(caller):
                return False
            del self._callers[newest]
        self._callers[caller] = now
        return True
