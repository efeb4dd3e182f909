"""Every effect has one handler, whichever driver it is."""

from __future__ import annotations

import pytest

from peers.errors import LocalProtocolError
from peers.protocol.effect_table import EFFECTS, EffectTable, Handling, row
from peers.protocol.effects import Effect, Note, Stop, Trouble

done: list[Effect] = []
ROWS = [row(kind, done.append) for kind in EFFECTS]


@pytest.mark.parametrize("effect", [Stop(), Note("info", "a word")], ids=["stop", "note"])
def test_an_effect_is_carried_out_by_its_own_handler(effect: Effect) -> None:
    mine = list[Effect]()
    rows = [one for one in ROWS if one.kind is not type(effect)]
    EffectTable(*rows, row(type(effect), mine.append)).carry_out(effect)
    assert (mine, done) == ([effect], [])


@pytest.mark.parametrize(
    "rows",
    [[one for one in ROWS if one.kind is not Trouble], [*ROWS, row(Trouble, done.append)]],
    ids=["one is forgotten", "one is named twice"],
)
def test_a_table_with_no_handler_or_two_is_a_bug_of_ours(rows: list[Handling]) -> None:
    with pytest.raises(LocalProtocolError, match="exactly one handler: see Trouble"):
        EffectTable(*rows)
