"""One fragment of theta while this machine trains it: where its work began, what payloads have left out of it, and what
workers are told of it. Of a run that does not stream there is one, for which everybody waits.

While workers train for outer step k they store a fragment into `local`, are told when its outer step is taken, and then
find its new values in `local`. They never read theta in the midst of training, so nobody waits for them to change it.
`local` belongs to the workers until all have stored the fragment; then it is encoded; then it belongs to this process,
until the workers are told; then to the workers again.

What may become of the fragment in outer step k, and what the workers are told:

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

import numpy as np

from opendiloco.errors import WorkerError
from opendiloco.kernels import SPARSE, NonFiniteError, Payload, Rounding, dequantize
from opendiloco.shared_memory import Vector
from opendiloco.training.codec import BlockCodec

PIECE_BLOCKS = 16
"""Of a payload, that are decoded at once, so that it takes no memory to speak of."""


class FragmentWork:
    """Work on one fragment begins with its theta, its *base*, which mostly stays so until the work is encoded.

    A copy of the base is made only where an outer step is taken before: one that others have made without us. In a run
    that streams work may go on from what is encoded, where nothing comes of that: `outlives_encoding`.
    """

    def __init__(
        self, theta: Vector, local: Vector, codec: BlockCodec, error_feedback: float, outlives_encoding: bool
    ) -> None:
        """`theta` and `local` are the fragment's parts of the vectors."""
        self.theta = theta
        self.local = local
        self.codec = codec
        self.payload = codec.empty_payload()
        """The newest contribution."""
        self.residual = Residual(error_feedback, codec.values)
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

    def encode(self, rounding: Rounding) -> None:
        """Encode what has been trained. Raises: WorkerError when the weights that training left are not finite."""
        try:
            self.codec.encode_difference(self.base, self.local, self.payload, rounding, self.residual.to_add())
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


class Residual:
    """Error feedback: what payloads have left out, and later ones make up for (arXiv 1901.09847).

    A `share` of what a payload has left out is added to the next pseudo-gradient that is encoded. Once an outer step
    was taken without our payload nobody knows what of it is still to be made up for, so it is forgotten.

    A sparse average leaves out most of what its members' payloads hold, and reducers keep no residuals. Each member
    takes back what of its own is where the average has nothing: all of them together take back all that was left out.
    """

    def __init__(self, share: float, values: int) -> None:
        """It has so many fp32 `values`, where the run has error feedback."""
        self._share = np.float32(share)
        self._vector: Vector | None = np.zeros(values, np.float32) if share else None
        self._is_sent = False  # what a payload holds, that no average has answered yet

    def to_add(self) -> Vector | None:
        """Return what to add to the pseudo-gradient, and to replace by what its payload leaves out."""
        self._is_sent = True
        if self._vector is not None:
            self._vector *= self._share
        return self._vector

    def take_back(self, own: Payload, average: Payload) -> None:
        """Add what our payload holds where the average that it is in has nothing. Both were checked before."""
        is_answered, self._is_sent = self._is_sent, False
        if self._vector is None or not is_answered or average.format is not SPARSE:
            return
        for start in range(0, average.values, PIECE_BLOCKS * SPARSE.block_values):
            sent, applied = _decoded_piece(own, start), _decoded_piece(average, start)
            sent[applied != 0] = 0
            self._vector[start : start + sent.size] += sent

    def forget(self) -> None:
        """Have nothing made up for: an outer step was taken without our payload."""
        self._is_sent = False
        if self._vector is not None:
            self._vector[:] = 0

    def forget_unanswered(self) -> None:
        """Forget it if its payload is in no entry by now: training begins anew."""
        if self._is_sent:
            self.forget()


def _decoded_piece(payload: Payload, start: int) -> Vector:
    """Return the values from `start` on, a multiple of a piece's."""
    first, values = start // payload.format.block_values, payload.values - start
    first_byte, end = payload.format.byte_range(first, first + PIECE_BLOCKS, payload.values)
    out: Vector = np.empty(min(values, PIECE_BLOCKS * payload.format.block_values), np.float32)
    dequantize(Payload(payload.format, out.size, payload.buffer[first_byte:end]), out)
    return out
