"""A driver's table of the handlers of all effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from peers.errors import LocalProtocolError
from peers.protocol.effects import Effect

E = TypeVar("E")
EFFECTS = frozenset(Effect.__subclasses__())


class Handling(NamedTuple):
    """One kind of effect, and what carries it out."""

    kind: type[Any]
    handler: Callable[[Any], object]


def row(kind: type[E], handler: Callable[[E], object]) -> Handling:
    """Return a row, in which the handler takes this very kind."""
    return Handling(kind, handler)


class EffectTable:
    """Every effect has exactly one handler."""

    def __init__(self, *rows: Handling) -> None:
        """Raises: LocalProtocolError when an effect has no handler, or two."""
        self._handlers: dict[type[Any], Callable[[Any], object]] = dict(rows)
        if self._handlers.keys() != EFFECTS or len(rows) != len(EFFECTS):
            counts = Counter(kind.__name__ for kind in [*EFFECTS, *(one.kind for one in rows)])
            wrong = ", ".join(sorted(name for name, count in counts.items() if count != 2))
            raise LocalProtocolError(f"each effect needs exactly one handler: see {wrong}")

    def carry_out(self, effect: Effect) -> None:
        self._handlers[type(effect)](effect)
