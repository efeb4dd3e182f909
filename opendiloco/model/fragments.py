"""Which parameters are synchronised together: the fragments of Streaming DiLoCo (arXiv 2501.18512, section 2.2).

With n blocks to a fragment, L blocks make ceil(L / n) fragments (the paper's 24, 48 and 108 blocks with n = 3 make 8,
16 and 36). What the paper says, and what is ours:

- "strided", its default: fragment p has the blocks p, p + P, p + 2P …, P being the number of the blocks' fragments.
- "sequential": fragment p has the n consecutive blocks from n·p on.
- "balanced" is ours: whole tensors, embeddings among them, are dealt out by size, the largest first, each to the
  fragment that is smallest so far. So many fragments as there would be of blocks.
- Embeddings: the paper shows "all fragments but the embedding" and the "embedding fragment" apart (figure 17), and
  synchronises some fragment every 11, 5 and 2 of 100 inner steps (appendix), which is 100 / 9, 100 / 17 and 100 / 37,
  one fragment more than those of blocks. So "apart" is the default. It does not say where the head and the last norm
  are. Here they go with the embeddings, which also keeps tied ones together. This fragment is the last.
- "ends" is ours: what comes before the blocks goes with their first fragment, what comes after them with the last.

Fragments are numbered as they are synchronised within a cycle; the last one closes it. What is not trained is in none,
and a fragment of which nothing is trained does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import torch

from opendiloco.config.streaming import StreamingSection
from opendiloco.model.blocks import transformer_blocks
from peers.errors import ManifestError


def assign_fragments(
    model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter], streaming: StreamingSection
) -> tuple[int, ...]:
    """Return the fragment of each trained parameter. Raises: ManifestError when the model has no blocks to cut."""
    layers, parameters = streaming.layers_per_fragment, list(trained.values())
    if layers is None:
        return (0,) * len(parameters)
    blocks = [list(block.parameters()) for block in transformer_blocks(model)]
    if not blocks:
        raise ManifestError(
            "streaming.layers_per_fragment: this model has no transformer blocks that can be told apart.",
            "Remove the table [streaming].",
        )
    fragments = ceil(len(blocks) / layers)
    if streaming.pattern == "balanced":
        return _numbered(_balanced([parameter.numel() for parameter in parameters], fragments))
    of_block = {id(parameter): number for number, block in enumerate(blocks) for parameter in block}
    places = [of_block.get(id(parameter)) for parameter in parameters]
    is_strided, is_apart = streaming.pattern == "strided", streaming.embeddings != "ends"
    numbers, before = [], True
    for block in places:
        before = before and block is None
        if block is not None:
            numbers.append(block % fragments if is_strided else block // layers)
        else:
            numbers.append(fragments if is_apart else 0 if before else fragments - 1)
    return _numbered(numbers)


def _balanced(sizes: Sequence[int], fragments: int) -> list[int]:
    """Deal tensors out by size: the largest first, in the model's order where sizes are equal, each to the smallest
    fragment, the first of several."""
    filled, numbers = [0] * fragments, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        numbers[place] = filled.index(min(filled))
        filled[numbers[place]] += sizes[place]
    return numbers


def _numbered(numbers: Sequence[int]) -> tuple[int, ...]:
    """Number fragments without gaps, in the same order."""
    present = sorted(set(numbers))
    return tuple(present.index(number) for number in numbers)
