"""Outer steps as a whole: all payloads of a cycle are known to be good before the first of them changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from peers.values.amendments import Amendment
from peers.values.workload import BadBlocksError, Blocks, ReplicatedState


async def step(state: ReplicatedState, index: int, payloads: Mapping[int, Blocks], amendment: Amendment | None) -> None:
    """Take outer step `index` of each fragment of which there is a payload. The others stay as they are. `amendment` is
    the one that is in force before the cycle.

    Raises: BadBlocksError, and changes nothing.
    """
    if len(payloads) > 1:  # one alone is checked when it is applied
        for fragment, payload in payloads.items():
            blocked = state.fragments[fragment]
            if len(payload) != blocked.byte_range(0, blocked.block_count)[1]:
                raise BadBlocksError(f"{len(payload)} bytes are no payload of fragment {fragment}")
            await asyncio.to_thread(blocked.check, payload, 0)
    for fragment in sorted(payloads):
        await state.apply(payloads[fragment], index, fragment, amendment=amendment)
