"""What comes back to workers for the fragments that they have stored, in a run that streams.

While workers train for outer step k they store a fragment p into `local`, are told when its outer step is taken, and
then find its new values in `local`. They never read theta in the midst of training, so nobody waits for them to change
it. `local` of a fragment belongs to the workers until all have stored it; then it is encoded; then it belongs to this
process, until the workers are told; then to the workers again.

What may become of fragment p in outer step k, and what the workers are told:

- Stored, encoded, then applied, whether or not our contribution is in it: its new values are there. Work goes on from
  those, and counts from the new theta.
- Applied before it is stored, since others have made the entry without us: the same, as soon as it is stored. What was
  learned of it goes into the fragment's next entry, for which nobody waits here.
- No payload, since nobody had trained it, or nobody takes what we have: go on. Work counts from what it counted from.
- Applied, but workers that had stored it are lost: nothing. New ones train the lease again from the fragments' bases.
  They store it once more, where it is not encoded again, and are told what became of it.
- Not decided when the training is stopped or fails, or another state is fetched: nothing, also later. The next training
  begins with theta.
- Not decided when the training is done: the same as in its midst. All is decided before the next one begins.
- Said to have no payload, and applied after all, since its entry was on the way: workers have gone on. Their work
  counts from the theta before that entry until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from opendiloco.outer.bases import Bases
from opendiloco.outer.state import OuterState
from opendiloco.shared_memory import Vector

Tell = Callable[[int, bool], Awaitable[None]]
"""Tells the workers that they may go on with a fragment, and whether its new values are in `local`."""


class Handover:
    """One training after the other. `state` changes only while `lock` is held."""

    def __init__(self, state: OuterState, bases: Bases, local: Vector, lock: asyncio.Lock, tell: Tell) -> None:
        self._state = state
        self._bases = bases
        self._local = local
        self._lock = lock
        self._tell = tell
        self._index: int | None = None  # the outer step that workers train for, or have trained for last
        self._read: set[int] = set()  # what workers have stored of these was encoded
        self._encoded: set[int] = set()
        self._stored: set[int] = set()
        self._decided: dict[int, bool] = {}  # whether a fragment's outer step has changed it
        self._told: set[int] = set()

    def begin(self, index: int, follows: bool) -> bool:
        """Begin a training. Returns whether workers go on from where they are: it `follows` what they have trained, and
        they know what became of all of that. Otherwise they are to begin with theta."""
        goes_on = follows and self._index is not None and len(self._told) == len(self._state.fragments)
        if not goes_on:
            self._bases.begin_all()
        self._index = index
        self._read, self._encoded, self._stored, self._decided, self._told = set(), set(), set(), {}, set()
        return goes_on

    def begin_again(self) -> None:
        """The workers are lost: new ones train the same once more."""
        self._stored, self._told = set(), set()

    def end(self) -> None:
        """Nothing that was trained goes on."""
        self._index = None

    def is_encoded(self, fragment: int) -> bool:
        """Return whether a fragment was stored in this training before, by workers that are lost."""
        return fragment in self._encoded

    def read(self, fragment: int) -> None:
        """Note that what workers have stored of a fragment is encoded, and offered next."""
        self._read.add(fragment)

    def has_told(self, fragment: int) -> bool:
        """Return whether workers go on with a fragment that they have stored: from then on its theta is their base,
        also where a later outer step takes what they had stored."""
        return self._index is not None and fragment in self._told

    def hands_over(self, index: int, fragment: int) -> bool:
        """Return whether an outer step that is taken now is one that workers wait for: its theta is their next base."""
        is_theirs = self._index is not None and index >= self._index
        return is_theirs and fragment in self._stored and fragment not in self._decided

    async def stored(self, fragment: int) -> None:
        """All workers have stored a fragment, and it is encoded."""
        self._encoded.add(fragment)
        self._stored.add(fragment)
        if fragment in self._decided:
            async with self._lock:
                await self._hand_over(fragment)

    async def decided(self, index: int, fragment: int, is_changed: bool) -> None:
        """An outer step of a fragment is taken, or leaves it as it is; what is said first counts, but one that is taken
        before workers have stored it counts more than that it is left as it is. The lock is held."""
        if self._index is None or index < self._index:
            return
        if fragment in self._decided and (self._decided[fragment] or fragment in self._read):
            return
        self._decided[fragment] = is_changed
        if fragment in self._stored:
            await self._hand_over(fragment)

    async def _hand_over(self, fragment: int) -> None:
        index, is_changed = self._index, self._decided.get(fragment, False)
        part = self._state.fragments[fragment]
        if is_changed:
            await asyncio.to_thread(np.copyto, self._local[part], self._state.theta[part])
            self._bases.begin(fragment)
        if index != self._index or fragment not in self._stored:
            return  # nobody waits any more
        await self._tell(fragment, is_changed)
        self._told.add(fragment)
