"""The place of each trainable parameter in a flat fp32 vector. Peers send each other vectors, but not layouts."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from opendiloco.alignment import next_fragment


@dataclass(frozen=True)
class Parameter:
    """One trainable parameter: the values from `offset` to offset + size - 1 of the flat vector, row by row."""

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
    """The places of a model's trainable parameters in a flat vector, in the model's order. Tied weights have one place.

    The parameters of a fragment are contiguous. Between two fragments there may be up to `ALIGNMENT` - 1 values of
    padding, which belong to no fragment: they are zero in theta and momentum, and payloads do not contain them.
    """

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]], fragment_of: Sequence[int] | None = None) -> None:
        """Create the layout of parameters with these names and shapes. `fragment_of` is the number of each parameter's
        fragment: 0, 1, … without gaps; by default, all parameters are in fragment 0."""
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
        """The slice of each fragment in the flat vector."""
        self.size: int = fragments[-1].stop
        """Length of the flat vector, including padding."""

    @property
    def parameter_count(self) -> int:
        """The number of trained values, without padding."""
        return sum(parameter.size for parameter in self)

    def part(self, names: Container[str]) -> Self:
        """Return a layout of only the parameters with these names, at the same places in the flat vector."""
        part = copy(self)
        part._parameters = [parameter for parameter in self if parameter.name in names]
        return part

    def fragment(self, number: int) -> Self:
        """Return a layout of only the parameters in fragment `number`, at the same places in the flat vector."""
        whole = self.fragments[number]
        return self.part({each.name for each in self if whole.start <= each.offset < whole.stop})

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)
