"""Methods: which part of a model is exchanged after which inner step, and when the result is needed. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

GRADIENT_BITS = 16.0
"""Of a value that is not quantized: bf16."""
QUANTIZED, QUANTIZED_SPARSE = 1.67e9, 0.37e9
"""Values a second that one thread encodes, and as sparse payloads with error feedback (docs/codecs.md)."""

Spacing = Callable[[int, int], tuple[tuple[int, ...], int]]
"""Takes the inner steps of a cycle and a number of fragments; returns after which inner step each is synchronised,
counted from 1, and the length of the cycle."""


@dataclass(frozen=True)
class Shape:
    """How many values each layer of a model has, and how many are in none: embeddings, head and last norm."""

    layers: tuple[int, ...]
    rest: int = 0

    @classmethod
    def even(cls, layers: int, values: int) -> Self:
        """Return the shape of a model whose layers share all its values equally."""
        return cls(tuple(values * (layer + 1) // layers - values * layer // layers for layer in range(layers)))

    @property
    def values(self) -> int:
        return sum(self.layers) + self.rest


@dataclass(frozen=True)
class Fragment:
    """Layers that are synchronised together, and the number of values that are."""

    layers: tuple[int, ...]
    values: int


@dataclass(frozen=True)
class Method:
    """When each fragment is synchronised, and how many bits a value takes on the way.

    Fragment i is sent after inner step `ends[i]` of each cycle of `cycle` inner steps. Training goes on for `overlap`
    inner steps (the paper's tau) without the result; with 0 it waits. `encoded` values become payload in a second.
    """

    name: str
    fragments: tuple[Fragment, ...]
    ends: tuple[int, ...]
    cycle: int
    overlap: int = 0
    bits: float = GRADIENT_BITS
    encoded: float = QUANTIZED


def equal_spacing(inner_steps: int, fragments: int) -> tuple[tuple[int, ...], int]:
    """Synchronise a fragment every round(H / P) inner steps: the spacing that reproduces the paper's table. A cycle may
    then be a little longer or shorter than H."""
    spacing = max(1, round(inner_steps / fragments))
    return tuple(spacing * (place + 1) for place in range(fragments)), spacing * fragments


def exact_cycle(inner_steps: int, fragments: int) -> tuple[tuple[int, ...], int]:
    """Synchronise every fragment once in exactly H inner steps, as evenly as whole steps allow; as our workers do."""
    return tuple(-(-(place + 1) * inner_steps // fragments) for place in range(fragments)), inner_steps


def strided(shape: Shape, fragment_layers: int) -> tuple[Fragment, ...]:
    """Return interleaved fragments of so many layers (Figure 2 of arXiv 2501.18512), and one of what is in no layer."""
    count = -(-len(shape.layers) // fragment_layers)
    parts = [tuple(range(first, len(shape.layers), count)) for first in range(count)]
    fragments = [Fragment(part, sum(shape.layers[layer] for layer in part)) for part in parts]
    return (*fragments, Fragment((), shape.rest)) if shape.rest else tuple(fragments)


def data_parallel(shape: Shape, bits: float = GRADIENT_BITS) -> Method:
    """Return data-parallel training: all gradients after each step."""
    return Method("data-parallel", (_whole(shape),), (1,), 1, bits=bits)


def diloco(shape: Shape, inner_steps: int, bits: float = GRADIENT_BITS) -> Method:
    """Return DiLoCo: the whole pseudo-gradient after each H inner steps, while training waits."""
    return Method("DiLoCo", (_whole(shape),), (inner_steps,), inner_steps, bits=bits)


def streaming(
    name: str,
    shape: Shape,
    inner_steps: int,
    fragment_layers: int,
    overlap: int = 0,
    bits: float = GRADIENT_BITS,
    spacing: Spacing = exact_cycle,
) -> Method:
    """Return Streaming DiLoCo (arXiv 2501.18512): one fragment at a time."""
    fragments = strided(shape, fragment_layers)
    ends, cycle = spacing(inner_steps, len(fragments))
    return Method(name, fragments, ends, cycle, overlap, bits)


def _whole(shape: Shape) -> Fragment:
    return Fragment(tuple(range(len(shape.layers))), shape.values)
