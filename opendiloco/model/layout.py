"""Where each trainable parameter lies in a flat fp32 vector. Layouts stay on one machine; vectors travel."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Self


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
    """The model's trainable parameters, in the model's order, without gaps; tied weights appear once."""

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        ends = list(accumulate((math.prod(shape) for _, shape in shapes), initial=0))
        self._parameters = [
            Parameter(name, tuple(shape), offset) for (name, shape), offset in zip(shapes, ends, strict=False)
        ]
        self.size = ends[-1]

    def part(self, names: Container[str]) -> Self:
        """Return the same layout of these parameters alone: the others leave gaps."""
        part = copy(self)
        part._parameters = [parameter for parameter in self if parameter.name in names]
        return part

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)
