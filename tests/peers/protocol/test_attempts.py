"""Who holds an attempt up, by what its members say."""

from __future__ import annotations

from peers.protocol.attempts import held_up_by
from peers.protocol.messages import Begin
from tests.peers.protocol.test_exchange import AT, round_among

BEGIN = Begin(attempt=AT, round=round_among("abcdef", idle="def"), seconds=1.0, open=False, commitments=())


def waiting(**named: str) -> dict[str, tuple[str, ...]]:
    return {member: tuple(names) for member, names in named.items()}


def test_of_those_who_wait_for_each_other_it_is_the_one_that_owes_blocks() -> None:
    """Regression: a, b and c, which could average nothing without f's blocks, were named as often as f."""
    said = waiting(a="f", b="f", c="f", d="abc", e="abc", f="abc")
    assert held_up_by(BEGIN, "abcdef", (), said) == ("f",)


def test_one_reducer_alone_puts_the_blame_on_nobody() -> None:
    said = waiting(a="def", b="a", c="a", d="a", e="a", f="a")
    assert held_up_by(BEGIN, "abcdef", (), said) == ("a",)
