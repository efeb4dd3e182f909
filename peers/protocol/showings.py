"""What has been shown to whom: a proof may be as long as a chunk, so it is not sent again with each word about it."""

from __future__ import annotations


class Showings:
    """Of one place in the log. Each proof is shown to each peer once, and again where there is reason to, after a pause
    that doubles each time: what is asked for again and again costs little more than what is asked for a few times."""

    def __init__(self, pause: float) -> None:
        """`pause`: seconds until a proof is shown for the second time."""
        self._pause = pause
        self._shown: dict[tuple[str, bytes], tuple[int, float]] = {}  # how often each, and when last

    def is_due(self, peer: str, proof: bytes, now: float, is_lacking: bool) -> bool:
        """Return whether to show a peer the proof with this digest now, and note that it is. `is_lacking`: whether
        there is reason to show it again."""
        times, last = self._shown.get((peer, proof), (0, 0.0))
        is_again = is_lacking and now - last >= self._pause * 2.0 ** (times - 1)
        if times and not is_again:
            return False
        self._shown[peer, proof] = times + 1, now
        return True
