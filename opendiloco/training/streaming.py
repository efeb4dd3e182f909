"""Fragments of theta on their way: in a worker, `Cycles`; in the peer process, `FragmentWork`.

A run that does not stream has one fragment, for which everybody waits.

While workers train for outer step k they store a fragment into `local`, are told when its outer step is taken, and then
find its new values in `local`. They never read theta in the midst of training, so nobody waits for them to change it.
`local` belongs to the workers until all have stored the fragment; then it is encoded; then it belongs to the peer
process, until the workers are told; then to the workers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from opendiloco.config.run_config import StreamingSection
from opendiloco.errors import WorkerError
from opendiloco.kernels import NonFiniteError, Payload, Rounding, quantize_difference
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import BlockCodec, Residual

# In a worker ----------------------------------------------------------------------------------------------------------
_ENDED = object()


class Cycles:
    """One replica's way through cycles: what Algorithm 2 of arXiv 2501.18512 has it do, and after which inner step. The
    worker process and the one-process reference both go this way, so that they do the same at the same step.

    A replica stores each fragment on its way, and goes on with what it has until the average is to be merged.

    Of a replica that takes n inner steps in a cycle, fragment p = 0 … P - 1 is due after ceil((p + 1) n / P) of them,
    the last one after all. In the run's last cycle all are due after all steps: a final synchronisation, without which
    theta would lack what was learned of a fragment after it was stored. A fragment is stored the run's overlap before
    it is due, so that no average is awaited when a cycle ends; but when it is due in the cycle that the replica begins
    with theta, since it has learned nothing before, and in the last one, after which nothing is awaited. What was
    averaged is merged into it when the overlap is over, before the next inner step, which may be one of the next cycle;
    and at once where it would be stored once more.
    """

    def __init__(
        self,
        store: Callable[[Vector, int], None],
        merge: Callable[[Vector, int, float], None],
        fragments: int,
        streaming: StreamingSection,
    ) -> None:
        """`store` and `merge` are those of a replica; see `ModelReplica`."""
        self._store_weights, self._merge_theta = store, merge
        self._fragments = fragments
        self._alpha = streaming.mixing
        self._lead = streaming.overlap
        self._taken = 0  # inner steps, ever
        self._due: dict[int, int] = {}  # after how many of them a fragment is merged

    def begin(self, planned: int, steps: Iterator[object], overlap: int, goes_on: bool, is_last: bool) -> None:
        """Begin a cycle of so many planned inner steps, each taken by a turn of `steps`: where the replica was when the
        cycle before ended, or else with theta, when nothing is left to be merged. `is_last`: it is the run's last one.
        """
        if not goes_on:
            self._due.clear()
        self._lead_now = self._lead if goes_on and not is_last else 0
        self._planned, self._steps, self._is_last = planned, steps, is_last
        self._overlap, self._began = overlap, self._taken

    def train_up_to(self, fragment: int, theta: Vector) -> bool:
        """Take the inner steps before a fragment is stored, and merge what is due before each. Returns whether the
        replica has come so far: it may have been told to stop."""
        due = self._planned if self._is_last else -(-(fragment + 1) * self._planned // self._fragments)
        has_come = self._take_up_to(max(due - self._lead_now, 0), theta)
        if has_come and fragment in self._due:
            self._merge(fragment, theta)
        return has_come

    def store(self, local: Vector, fragment: int) -> None:
        """Store a fragment's weights, to be averaged. What comes of it is merged when the overlap is over."""
        self._store_weights(local, fragment)
        self._due[fragment] = self._taken + self._overlap

    def train_to_the_end(self, theta: Vector) -> bool:
        """Take the inner steps that are left when the last fragment is stored. Returns as `train_up_to`."""
        has_come = self._take_up_to(self._planned, theta)
        assert next(self._steps, _ENDED) is _ENDED, "there are more inner steps than planned"
        return has_come

    def merge_what_is_due(self, theta: Vector) -> None:
        for fragment in [fragment for fragment, due in self._due.items() if due <= self._taken]:
            self._merge(fragment, theta)

    def _take_up_to(self, offset: int, theta: Vector) -> bool:
        while self._taken < self._began + offset:
            self.merge_what_is_due(theta)
            if next(self._steps, _ENDED) is _ENDED:
                return False
            self._taken += 1
        return True

    def _merge(self, fragment: int, theta: Vector) -> None:
        self._merge_theta(theta, fragment, self._alpha)
        del self._due[fragment]


# In the peer process --------------------------------------------------------------------------------------------------


class FragmentWork:
    """Work on one fragment begins with its theta, its *base*, which mostly stays so until the work is encoded.

    A copy of the base is made only where an outer step is taken before: one that others have made without us. In a run
    that streams work may go on from what is encoded, where nothing comes of that: `outlives_encoding`.

    What may become of the fragment in outer step k, and what the workers are told:

    - Stored, encoded, then applied, whether or not our contribution is in it: its new values are there. Work goes on
      from those, and counts from the new theta.
    - Applied before it is stored, since others have made the entry without us: the same, as soon as it is stored. What
      was learned of it goes into the fragment's next entry, for which nobody waits here.
    - No payload, since nobody had trained it, or nobody takes what we have: go on. Work counts from what it counted
      from.
    - Applied, but workers that had stored it are lost: nothing. New ones train the lease again from the fragments'
      bases. They store it once more, where it is not encoded again, and are told what became of it.
    - Not decided when the training is stopped or fails, or another state is fetched: nothing, also later. The next
      training begins with theta.
    - Not decided when the training is done: the same as in its midst. All is decided before the next one begins.
    - Said to have no payload, and applied after all, since its entry was on the way: workers have gone on. Their work
      counts from the theta before that entry until the next one.
    """

    def __init__(
        self, theta: Vector, local: Vector, codec: BlockCodec, residual: Residual, outlives_encoding: bool
    ) -> None:
        """`theta` and `local` are the fragment's parts of the vectors."""
        self.theta = theta
        self.local = local
        self.codec = codec
        self.payload = codec.empty_payload()
        """The newest contribution."""
        self._room = self.payload.buffer  # the largest format is the average's
        self.residual = residual
        self._outlives_encoding = outlives_encoding
        self._copy: Vector | None = None  # of the base, if that is not theta any more
        self._is_base_needed = True  # until what has been trained is encoded
        self.begin_training(from_theta=True)

    def begin_training(self, from_theta: bool) -> None:
        """Begin another training: `from_theta`, or from where workers are."""
        if from_theta:
            self.begin()
        self.is_read = False  # whether what workers have stored was encoded, and is offered next
        self.is_encoded = False  # whether it was stored and encoded, perhaps by workers that are lost
        self.is_changed: bool | None = None  # whether the outer step has changed it; None: not decided yet
        self.begin_again()

    def begin_again(self) -> None:
        """Note that the workers are lost: new ones train the same once more."""
        self.is_stored = self.is_told = False

    @property
    def base(self) -> Vector:
        """Return the theta that the work has begun with."""
        return self.theta if self._copy is None else self._copy

    def begin(self) -> None:
        """Have work begin, or go on, with the present theta."""
        self._copy, self._is_base_needed = None, True

    def keep_base(self) -> None:
        """Keep the base: theta is about to change."""
        if self._copy is None and self._is_base_needed:
            self._copy = self.theta.copy()

    def drop_base(self) -> None:
        """Have the next work begin with the theta of then: none goes on, if there was any."""
        self._copy = None

    def encode(self, rounding: Rounding, format: int = 0, folder: Path | None = None) -> None:
        """Encode what has been trained in a format; see `Residual.to_add`.

        Raises: WorkerError when the weights that training left are not finite.
        """
        kind = self.codec.formats[format]
        self.payload = Payload(kind, self.codec.values, self._room[: kind.payload_size(self.codec.values)])
        try:
            quantize_difference(self.base, self.local, self.payload, rounding, self.residual.to_add(format, folder))
        except NonFiniteError as error:
            raise WorkerError(f"the trained weights are unusable: {error.message}", error.remedy) from error
        if not self._outlives_encoding:  # nobody asks for the base any more
            self._copy, self._is_base_needed = None, False

    def decide(self, is_changed: bool) -> bool:
        """Take in whether an outer step has changed the fragment. Return False where that was decided before.

        What is said first counts, but an outer step that is taken before workers have stored the fragment counts more
        than that it is left as it is.
        """
        if self.is_changed is not None and (self.is_changed or self.is_read):
            return False
        self.is_changed = is_changed
        return True

    def take_theta(self) -> None:
        """Give workers the new values, from which their work counts from now on."""
        np.copyto(self.local, self.theta)
        self.begin()
