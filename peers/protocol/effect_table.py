"""The table of a driver's methods that carry out effects, one for each kind of effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from peers.errors import LocalProtocolError
from peers.protocol.effects import Effect

E = TypeVar("E")
EFFECTS = frozenset(Effect.__subclasses__())


class Handling(NamedTuple):
    """A row of the driver's table: a kind of effect, and the function that carries it out."""

    kind: type[Any]
    handler: Callable[[Any], object]


def row(kind: type[E], handler: Callable[[E], object]) -> Handling:
    """Return a row of the driver's table. With these parameter types, the type checker refuses a handler that takes
    another kind of effect."""
    return Handling(kind, handler)


class EffectTable:
    """The table of a driver's handlers: exactly one for each kind of effect."""

    def __init__(self, *rows: Handling) -> None:
        """Build the table. Raises: LocalProtocolError if a kind of effect has no handler, or more than one."""
        self._handlers: dict[type[Any], Callable[[Any], object]] = dict(rows)
        if self._handlers.keys() != EFFECTS or len(rows) != len(EFFECTS):
            counts = Counter(kind.__name__ for kind in [*EFFECTS, *(one.kind for one in rows)])
            wrong = ", ".join(sorted(name for name, count in counts.items() if count != 2))
            raise LocalProtocolError(f"each effect needs exactly one handler: see {wrong}")

    def carry_out(self, effect: Effect) -> None:
        self._handlers[type(effect)](effect)
