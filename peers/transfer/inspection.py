"""The norms of a payload's chunks, as its owner commits to them and everybody else recomputes them."""

from __future__ import annotations

from typing import Protocol

from peers.transfer.buffers import PayloadBuffers
from peers.values.sum_tree import Sum, SumTree
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocks, Inspect, PayloadKind


class Measuring(Protocol):
    """What this needs of the training side."""

    def squared_norm(self, blocks: Blocks, first_block: int, fragment: int = 0) -> float:
        """See `Workload.squared_norm`."""


def inspection(codec: Measuring, buffers: PayloadBuffers) -> Inspect:
    """Return what measures one chunk, and refuses bytes that are none."""

    def inspect(chunk: int, data: Blocks) -> float:
        start, stop = buffers.chunk_bytes(chunk)
        if len(data) != stop - start:
            raise BadBlocksError(f"chunk {chunk} has {len(data)} bytes, not {stop - start}")
        return codec.squared_norm(data, buffers.chunking.blocks(chunk)[0], buffers.fragment)

    return inspect


def payload_kind(codec: Measuring, buffers: PayloadBuffers) -> PayloadKind:
    """Return what the protocol is to know of a fragment's payloads."""
    return PayloadKind(buffers.size, inspection(codec, buffers))


def offer(own: Blocks, buffers: PayloadBuffers, inspect: Inspect) -> Sum:
    """Take this for our own blocks from now on. Return the root over their digests and norms.

    Raises: BadBlocksError when they are no payload.
    """
    leaves = list[Sum]()
    for chunk in range(buffers.size.chunks):
        start, stop = buffers.chunk_bytes(chunk)
        blocks = memoryview(own)[start:stop]
        leaves.append(Sum(digest_of(blocks), inspect(chunk, blocks)))
    buffers.own, buffers.tree = own, SumTree(leaves)
    return buffers.tree.root
