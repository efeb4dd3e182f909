"""State machines for the parts of a peer. Each has a table: the events that it handles in each state, and the next
states.

An event that the table does not have in the present state came late or early, and is dropped; a peer that still needs
an answer asks again. If the event is one that this peer creates itself (`EXACT`), the mismatch is a bug and raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from peers.errors import LocalProtocolError


@dataclass(frozen=True)
class Row:
    """The method that handles an event in one state, and the states that the machine may enter meanwhile, each with the
    reason."""

    method: str
    leads_to: Mapping[StrEnum, str] = field(default_factory=dict)


Table: TypeAlias = Mapping[StrEnum, Mapping[type, Row]]


class StateMachine:
    """One part of a peer: its state, and a table of the events that it handles in each state."""

    TABLE: ClassVar[Table]
    EXACT: ClassVar[frozenset[type]] = frozenset()
    """Events that must be in the table of the present state. All others may be late or early."""

    def __init__(self, state: StrEnum) -> None:
        self.state = state
        self._leads_to: Mapping[StrEnum, str] = {}

    def take(self, event: object, *context: Any) -> None:
        """Handle the event with the method that the table names for the present state. Drop the event if there is none.

        Raises:
            LocalProtocolError: an event of EXACT is not in the table of the present state, or the method enters a state
                that the table does not allow.
        """
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
