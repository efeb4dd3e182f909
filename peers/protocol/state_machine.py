"""State machines, which the parts of a peer are: a table says which event is legal in which state, and where it leads.

An event that the table does not have is late or early, and dropped: a peer that still needs an answer asks again. If it
is of our own making (`EXACT`) it is a bug, and raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from peers.errors import LocalProtocolError


@dataclass(frozen=True)
class Row:
    """The method that takes an event, and the states in which the part may be after it, with the reasons."""

    method: str
    leads_to: Mapping[StrEnum, str] = field(default_factory=dict)


Table: TypeAlias = Mapping[StrEnum, Mapping[type, Row]]


class StateMachine:
    """One part of a peer: its state, and the events that it takes in it."""

    TABLE: ClassVar[Table]
    EXACT: ClassVar[frozenset[type]] = frozenset()
    """Events that come only where the table has them; all others may be late or early."""

    def __init__(self, state: StrEnum) -> None:
        self.state = state
        self._leads_to: Mapping[StrEnum, str] = {}

    def take(self, event: object, *context: Any) -> None:
        """Let the method take the event that the table names. Raises: LocalProtocolError for a mistake of ours."""
        row = self.TABLE[self.state].get(type(event))
        if row is None:
            if type(event) in self.EXACT:
                name = type(self).__name__.lower()
                raise LocalProtocolError(f"{type(event).__name__} for a {name} that is {self.state}")
            return
        before, self._leads_to = self._leads_to, row.leads_to
        try:
            getattr(self, row.method)(event, *context)
        finally:
            self._leads_to = before

    def _enter(self, state: StrEnum) -> None:
        if state not in self._leads_to:
            raise LocalProtocolError(f"a {type(self).__name__.lower()} that is {self.state} can't become {state} now")
        self.state = state
