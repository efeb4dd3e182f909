"""Amendments: what a run's organiser changes of the outer optimizer while the run goes on.

A manifest never changes. An amendment is signed by the same key, and an entry of the log takes it in: from the next
outer step on every peer steps with its values. Amendments are numbered. An entry takes in none but one with a higher
number than all before it, so nothing is replayed, and of two with one number the log has the one that came first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from peers.values.identity import Identity, verify
from peers.values.signing import Signature
from peers.values.wire import RunId, Value, pack

AMENDMENT_CONTEXT = b"diloco-peer amendment\0"  # a signature made for anything else is worth nothing here

Number = Annotated[int, Field(strict=True, ge=1, lt=2**62)]
LEAST_MOMENTUM = 1e-3
"""But for none at all: a delayed momentum divides by it."""


def check_momentum(value: float) -> float:
    """Return the momentum; 0 for -0, which is equal to it, and has other bytes. Raises: ValueError."""
    if 0 < value < LEAST_MOMENTUM:
        raise ValueError(f"a momentum of {value:g} is too small; use 0, or {LEAST_MOMENTUM:g} or more")
    return value + 0.0


LearningRate = Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)]
Momentum = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False), AfterValidator(check_momentum)]


class AmendmentText(Value):
    """What the organiser signs."""

    run: RunId
    number: Number
    learning_rate: LearningRate
    momentum: Momentum


class Amendment(Value):
    """The outer optimizer's learning rate, which a schedule goes on multiplying, and its momentum. Both stand in place
    of the manifest's, whatever earlier amendments said."""

    number: Number
    learning_rate: LearningRate
    momentum: Momentum
    signature: Signature

    @classmethod
    def sign(cls, run: str, number: int, learning_rate: float, momentum: float, organiser: Identity) -> Self:
        """Sign an amendment as the organiser. Raises: ValueError when a value is out of bounds."""
        signature = organiser.sign(_text(run, number, learning_rate, momentum))
        return cls(number=number, learning_rate=learning_rate, momentum=momentum, signature=signature)

    def __str__(self) -> str:
        return f"amendment {self.number} (outer learning rate {self.learning_rate:g}, momentum {self.momentum:g})"

    def is_signed(self, run: str, organiser: str) -> bool:
        """Return whether the organiser has signed it for this run."""
        text = _text(run, self.number, self.learning_rate, self.momentum)
        return _is_signed(text, self.signature, organiser)


# Heartbeats and headers repeat the same one, and a signature costs 0.1 ms to check: two of each of 10,000 peers fit.
# The key is what is signed, byte for byte: values that are equal may differ there.
@lru_cache(maxsize=32_768)
def _is_signed(text: bytes, signature: bytes, organiser: str) -> bool:
    return verify(organiser, text, signature)


def _text(run: str, number: int, learning_rate: float, momentum: float) -> bytes:
    said = AmendmentText(run=run, number=number, learning_rate=learning_rate, momentum=momentum)
    return AMENDMENT_CONTEXT + pack(said)


def newest(*amendments: Amendment | None) -> Amendment | None:
    """Return the amendment with the highest number, the first of several; None: there is none."""
    there = [amendment for amendment in amendments if amendment is not None]
    return max(there, key=lambda amendment: amendment.number, default=None)
