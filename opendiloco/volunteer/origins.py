"""How a state of a run came to be, as far as a log and heartbeats tell it: for the card of a model that is exported."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opendiloco.model.export import CurvePoint
from peers.log.folder import RunLog
from peers.log.header import Header


@dataclass(frozen=True)
class Past:
    """What came before a state: `last` is the entry that led to it, None before the first.

    `contributors` is the number of peers that have trained in the entries that are known; `is_whole`: those are all.
    `tokens` are those of the lineage by outer step, and `losses` what peers have found on held-out text.
    """

    last: Header | None
    contributors: int = 0
    is_whole: bool = False
    tokens: Mapping[int, int] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, log: RunLog, last: Header | None, losses: Mapping[int, float]) -> Past:
        """Return what a log tells of the state after the entry `last`."""
        if last is None:
            return cls(None, 0, True)
        contributors, tokens = set[str](), dict[int, int]()
        for header in log.headers(0, last.index + 1):
            contributors.update(member.peer for member in header.roster if member.tokens)
            tokens[header.index + 1] = header.lineage_tokens
        return cls(last, len(contributors), len(tokens) == last.index + 1, tokens, losses)

    @property
    def outer_steps(self) -> int:
        return self.last.index + 1 if self.last else 0

    def curve(self, loss: float) -> tuple[CurvePoint, ...]:
        """Return the losses in order up to this state, whose own loss is given."""
        losses = {step: found for step, found in self.losses.items() if step < self.outer_steps} | {
            self.outer_steps: loss
        }
        return tuple(
            CurvePoint(outer_step=step, loss=losses[step], tokens=self.tokens.get(step)) for step in sorted(losses)
        )


def command_line(*words: str | Sequence[str]) -> str:
    """Return the words of a `diloco-peer` command as one types them."""
    flat = [word for part in words for word in ([part] if isinstance(part, str) else part)]
    return shlex.join(["diloco-peer", *flat])
