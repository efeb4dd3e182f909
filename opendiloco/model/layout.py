"""The place of each trainable parameter in a flat fp32 vector. Layouts stay on one machine; peers exchange vectors."""

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

    The parameters of a fragment are contiguous. Between two fragments there may be up to `ALIGNMENT` - 1 values of
    padding, which belong to no fragment: they are zero in theta and momentum, and payloads do not contain them.
    """

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]], fragment_of: Sequence[int] | None = None) -> None:
        """`fragment_of` is the fragment of each parameter: 0, 1, … without gaps. The default is a single fragment."""
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
        """The number of trained values."""
        return sum(parameter.size for parameter in self)

    def part(self, names: Container[str]) -> Self:
        """Return the layout of these parameters only, at the same places."""
        part = copy(self)
        part._parameters = [parameter for parameter in self if parameter.name in names]
        return part

    def fragment(self, number: int) -> Self:
        """Return the layout of one fragment's parameters only, at the same places."""
        whole = self.fragments[number]
        return self.part({each.name for each in self if whole.start <= each.offset < whole.stop})

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)
