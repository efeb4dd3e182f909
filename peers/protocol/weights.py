"""Weights of contributions in an average (R16). Pure functions of the log, so that all reducers compute the same
weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peers.log.header import Member
from peers.log.settings import RunSettings
from peers.log.state import LogState


def weights_of(members: Iterable[Member], log: LogState, settings: RunSettings) -> dict[str, float]:
    """Return the weight of each member of the next entry: its tokens; in an asynchronous run less for older work."""
    if settings.contributions is None:
        return {member.peer: member.tokens for member in members}
    return {member.peer: aged(member.tokens, log.age(member.peer)) for member in members}


def aged(tokens: int, age: int) -> int:
    """Return the weight of tokens that are `age` outer steps old: tokens / sqrt(1 + age), as in FedBuff (arXiv
    2106.06639). Weights are whole numbers, so that sums are exact in any order. They are the same on every machine,
    because both operations round correctly."""
    return max(1, int(tokens / math.sqrt(1 + age))) if age and tokens else tokens
