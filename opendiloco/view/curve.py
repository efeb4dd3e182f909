"""A curve that grows for as long as a run does, in bounded room."""

from __future__ import annotations

MOST_POINTS = 1000


class Curve:
    """Means of what was seen in buckets of equal width. When there are too many, neighbours become one."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._buckets: dict[int, tuple[float, int]] = {}  # sum and count

    def add(self, x: float, y: float) -> None:
        bucket = int(x // self._width)
        total, count = self._buckets.get(bucket, (0.0, 0))
        self._buckets[bucket] = total + y, count + 1
        if len(self._buckets) > MOST_POINTS:
            self._widen()

    @property
    def points(self) -> list[tuple[float, float]]:
        """The means, each at the beginning of its bucket, from left to right."""
        return [(bucket * self._width, total / count) for bucket, (total, count) in sorted(self._buckets.items())]

    def _widen(self) -> None:
        merged: dict[int, tuple[float, int]] = {}
        for bucket, (total, count) in self._buckets.items():
            other, more = merged.get(bucket // 2, (0.0, 0))
            merged[bucket // 2] = total + other, count + more
        self._width, self._buckets = 2 * self._width, merged
