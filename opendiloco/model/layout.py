"""Where each trainable parameter lies in a flat fp32 vector. Layouts stay on one machine; vectors travel."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from opendiloco.alignment import next_fragment


@dataclass(frozen=True)
class Parameter:
    """One trainable parameter: values offset … offset + size - 1 of the flat vector, row-major."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.size)


class Layout:
    """The model's trainable parameters, in the model's order; tied weights appear once.

    Each fragment's lie together, without gaps. Between two fragments there are up to `ALIGNMENT` - 1 values of padding,
    which belong to no fragment: they are zeros in theta and in momentum, and never travel in a payload.
    """

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]], fragment_of: Sequence[int] | None = None) -> None:
        """`fragment_of` has each parameter's fragment: 0, 1, … without gaps; by default there is one fragment."""
        self.fragment_of = tuple(fragment_of or [0] * len(shapes))
        places: dict[int, Parameter] = {}
        fragments: list[slice] = []
        for fragment in range(max(self.fragment_of, default=0) + 1):
            start = end = next_fragment(fragments[-1].stop if fragments else 0)
            for place, (name, shape) in enumerate(shapes):
                if self.fragment_of[place] == fragment:
                    places[place] = Parameter(name, tuple(shape), end)
                    end += places[place].size
            fragments.append(slice(start, end))
        self._parameters = [places[place] for place in range(len(shapes))]
        self.fragments = tuple(fragments)
        """Where each fragment lies in the flat vector."""
        self.size: int = fragments[-1].stop
        """Length of the flat vector, padding included."""

    @property
    def parameter_count(self) -> int:
        """Return how many values are trained."""
        return sum(parameter.size for parameter in self)

    def part(self, names: Container[str]) -> Self:
        """Return the same layout of these parameters alone: the others leave gaps."""
        part = copy(self)
        part._parameters = [parameter for parameter in self if parameter.name in names]
        return part

    def fragment(self, number: int) -> Self:
        """Return the same layout of one fragment's parameters alone."""
        whole = self.fragments[number]
        return self.part({each.name for each in self if whole.start <= each.offset < whole.stop})

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)
