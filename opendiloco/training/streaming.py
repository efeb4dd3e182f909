"""The handling of a fragment between training and averaging: `FragmentSchedule` in a worker, `FragmentWork` in the peer
process.

A run that does not stream has one fragment, and all workers wait for its average.

While workers train for outer step k, they store a fragment into `local`. The peer process informs them when the
fragment's outer step is taken, and they find its new values in `local`. They do not read theta during training, so they
need not wait while it changes.

`local` belongs to the workers until all have stored the fragment. Then the peer process encodes it, and owns it until
it informs the workers; then it belongs to the workers again.
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


class FragmentSchedule:
    """Decides when one replica takes inner steps, stores fragments and merges them, by Algorithm 2 of arXiv 2501.18512.

    The worker process and the one-process reference both use this class, so that they do the same at the same step.

    The replica stores each fragment during a cycle, and trains on until it merges the fragment's average. In a cycle of
    n inner steps, fragment p = 0 … P - 1 is due after ceil((p + 1) n / P) of them, so the last fragment is due after
    all n.

    In the run's last cycle all fragments are due after all steps. Without this final synchronisation, theta would lose
    the training of a fragment after it is stored.

    A fragment is stored the run's overlap before it is due, so that no average is awaited at the end of a cycle. There
    are two exceptions: in a cycle that begins with theta the replica has learned nothing before, and after the last
    cycle there is nothing to wait for. There a fragment is stored when it is due.

    The replica merges the average when the overlap is over, before the next inner step, which may belong to the next
    cycle. If it is to store the fragment again earlier, it merges right before that.
    """

    def __init__(
        self,
        store: Callable[[Vector, int], None],
        merge: Callable[[Vector, int, float], None],
        fragments: int,
        streaming: StreamingSection,
    ) -> None:
        """Create the object. `store` and `merge` are methods of a `ModelReplica`."""
        self._store_weights, self._merge_theta = store, merge
        self._fragments = fragments
        self._alpha = streaming.mixing
        self._lead = streaming.overlap
        self._steps_taken = 0  # number of inner steps taken in all cycles
        self._due: dict[int, int] = {}  # by fragment: the value of `_steps_taken` at which to merge its average

    def begin(
        self, planned: int, steps: Iterator[object], overlap: int, keeps_weights: bool, is_runs_last: bool
    ) -> None:
        """Begin a cycle of `planned` inner steps, with an overlap in inner steps. Each `next(steps)` takes one.

        If the replica `keeps_weights`, it continues from the end of the previous cycle. Otherwise it begins with theta,
        and merges nothing that was stored before. `is_runs_last` is true in the run's last cycle.
        """
        if not keeps_weights:
            self._due.clear()
        self._lead_now = self._lead if keeps_weights and not is_runs_last else 0
        self._planned, self._steps, self._is_last = planned, steps, is_runs_last
        self._overlap, self._began = overlap, self._steps_taken

    def train_up_to(self, fragment: int, theta: Vector) -> bool:
        """Take the inner steps until `fragment` must be stored for averaging. Before each step, merge from `theta` the
        fragments whose overlap is over. Return False if a worker stopped before the last of these steps."""
        due = self._planned if self._is_last else -(-(fragment + 1) * self._planned // self._fragments)
        has_come = self._take_up_to(max(due - self._lead_now, 0), theta)
        if has_come and fragment in self._due:
            self._merge(fragment, theta)
        return has_come

    def store(self, local: Vector, fragment: int) -> None:
        """Write a fragment's weights to `local` for averaging, and plan to merge the fragment when the overlap is
        over."""
        self._store_weights(local, fragment)
        self._due[fragment] = self._steps_taken + self._overlap

    def train_to_the_end(self, theta: Vector) -> bool:
        """Take the cycle's inner steps that remain after the last fragment is stored. Before each step, merge from
        `theta` the fragments whose overlap is over. Return False if a worker stopped early."""
        has_come = self._take_up_to(self._planned, theta)
        assert next(self._steps, _ENDED) is _ENDED, "there are more inner steps than planned"
        return has_come

    def merge_what_is_due(self, theta: Vector) -> None:
        for fragment in [fragment for fragment, due in self._due.items() if due <= self._steps_taken]:
            self._merge(fragment, theta)

    def _take_up_to(self, offset: int, theta: Vector) -> bool:
        while self._steps_taken < self._began + offset:
            self.merge_what_is_due(theta)
            if next(self._steps, _ENDED) is _ENDED:
                return False
            self._steps_taken += 1
        return True

    def _merge(self, fragment: int, theta: Vector) -> None:
        self._merge_theta(theta, fragment, self._alpha)
        del self._due[fragment]


# In the peer process --------------------------------------------------------------------------------------------------


class FragmentWork:
    """Encodes one fragment's pseudo-gradient in the peer process, and records if an outer step changes the fragment.
    The *base* is the theta from which the pseudo-gradient is computed.

    The base is usually the present theta. A copy is made only when an outer step is taken before the work is encoded,
    which is one that others have made without this peer. In a run that streams, the base is kept after encoding
    (`outlives_encoding`), because work may go on from the encoded weights if no outer step takes them.

    The possible outcomes for the fragment in outer step k, and what the workers do:

    - Stored, encoded, then applied, with or without this peer's contribution: the workers take the new values. Their
      work counts from the new theta.
    - Applied before it is stored, because others have made the entry without this peer: the workers take the new
      values as soon as they have stored it. Their work so far goes into the fragment's next entry.
    - No payload, because no peer has trained it or no peer takes this contribution: the workers go on. Their work
      counts from the same base as before.
    - Applied, but the workers that had stored it are lost: replacements train the lease again from the fragments'
      bases. They store the fragment again, it is not encoded again, and they learn the outcome.
    - Not decided when the training is stopped or fails, or when another state is fetched: the workers get no outcome.
      The next training begins with theta.
    - Not decided when the training is done: as during training. All fragments are decided before the next training.
    - Decided as having no payload, and applied after all, because its entry was on its way: the workers have gone on.
      Their work counts from the theta before that entry until the next one.
    """

    def __init__(
        self, theta: Vector, local: Vector, codec: BlockCodec, residual: Residual, outlives_encoding: bool
    ) -> None:
        """Create the work with the present theta as its base. `theta` and `local` are slices of the run's vectors."""
        self.theta = theta
        self.local = local
        self.codec = codec
        self.payload = codec.empty_payload()
        """The newest contribution."""
        self._room = self.payload.buffer  # payloads of all formats fit, because the average's format is the largest
        self.residual = residual
        self._base_outlives_encoding = outlives_encoding
        self._copy: Vector | None = None  # a copy of the base, if theta has changed since the work began
        self._is_base_needed = True  # True while a pseudo-gradient may still be computed from `base`
        self.begin_training(from_theta=True)

    def begin_training(self, from_theta: bool) -> None:
        """Reset the fragment for another training, from theta or from the workers' present weights."""
        if from_theta:
            self.begin()
        self.is_encoded = False  # True once this peer's contribution is encoded
        self.is_captured = False  # True once the workers have stored the fragment for the first time
        # True: an outer step has changed the fragment; False: it is decided that no outer step does; None: undecided.
        self.is_changed: bool | None = None
        self.begin_again()

    def begin_again(self) -> None:
        """Mark the fragment as not stored, because workers were lost. Their replacements train the same lease again."""
        self.is_stored = self.is_handed_over = False

    @property
    def base(self) -> Vector:
        """The theta from which the work's pseudo-gradient is computed."""
        return self.theta if self._copy is None else self._copy

    def begin(self) -> None:
        """Make the present theta the base, from which the fragment's pseudo-gradient is computed."""
        self._copy, self._is_base_needed = None, True

    def keep_base(self) -> None:
        """Copy the base, from which the fragment's pseudo-gradient is computed, because theta is about to change. Do
        nothing if there is a copy, or if the pseudo-gradient is encoded and needs no base any more."""
        if self._copy is None and self._is_base_needed:
            self._copy = self.theta.copy()

    def drop_base(self) -> None:
        """Drop the copy of an older theta, so that the pseudo-gradient is computed from the present theta."""
        self._copy = None

    def encode(self, rounding: Rounding, format: int = 0, folder: Path | None = None) -> None:
        """Encode the base minus the trained weights in the codec's format number `format`. With error feedback, add the
        last payload's quantization errors before. For `folder` see `Residual.to_add`.

        Raises: WorkerError if the trained weights are not finite.
        """
        kind = self.codec.formats[format]
        self.payload = Payload(kind, self.codec.values, self._room[: kind.payload_size(self.codec.values)])
        try:
            quantize_difference(self.base, self.local, self.payload, rounding, self.residual.to_add(format, folder))
        except NonFiniteError as error:
            raise WorkerError(f"the trained weights are unusable: {error.message}", error.remedy) from error
        if not self._base_outlives_encoding:
            self._copy, self._is_base_needed = None, False

    def decide(self, is_changed: bool) -> bool:
        """Store `is_changed`, which is True if an outer step has changed the fragment, and return True. Keep an earlier
        value and return False if that value is True, or if the fragment is already encoded."""
        if self.is_changed is not None and (self.is_changed or self.is_encoded):
            return False
        self.is_changed = is_changed
        return True

    def take_theta(self) -> None:
        """Copy the fragment's new theta to `local` for the workers, and make it the base of their work."""
        np.copyto(self.local, self.theta)
        self.begin()
