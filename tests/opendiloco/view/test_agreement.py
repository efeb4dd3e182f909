"""Agreement and the table's rows, both from heartbeats alone."""

from __future__ import annotations

from opendiloco.config.run_config import RunConfig
from opendiloco.view.run_view import Agreement, _short_name, peers_table, plain_line, row_of
from peers.presence.heartbeat import Heartbeat, PeerState


def beat(peer: str, index: int, digest: int = 0, state: PeerState = PeerState.TRAINING) -> Heartbeat:
    return Heartbeat(
        run="small-x",
        peer=peer,
        incarnation=0,
        sequence=1,
        state=state,
        index=index,
        head=bytes([index]) * 32,
        state_digest=bytes([digest]) * 32,
        lineage_tokens=0,
        inner_step=3,
        tokens_per_second=1234.5,
        speed=0.0,
        loss=None if index == 0 else 2.5,
        addresses=(),
        roster_size=0,
    )


def test_peers_at_different_places_say_nothing_about_each_other() -> None:
    agreement = Agreement()
    agreement.observe([beat("a", 1, 7), beat("b", 2, 8)])
    assert agreement.compared == 0
    assert agreement.verdict is None
    assert "nothing to compare" in str(agreement)


def test_peers_at_one_place_are_compared_whenever_they_were_there() -> None:
    agreement = Agreement()
    agreement.observe([beat("a", 1, 7), beat("b", 2, 8)])
    agreement.observe([beat("a", 2, 8)])
    assert (agreement.compared, agreement.disagreements, agreement.verdict) == (1, (), True)
    assert str(agreement) == "all log and state digests agree (1 outer step compared)"
    agreement.observe([beat("c", 1, 9)])
    assert (agreement.disagreements, agreement.verdict) == ((1,), False)
    assert "DISAGREE at outer step 1" in str(agreement)


def test_the_logs_of_peers_without_two_state_digests_are_compared() -> None:
    agreement = Agreement()
    agreement.observe([beat("a", 1, 7), beat("b", 1, state=PeerState.ARCHIVING)])
    assert agreement.verdict is None
    assert str(agreement).startswith("the logs of 2 peers agree; no two have reported a state digest")
    agreement.observe([beat("c", 1, state=PeerState.ARCHIVING).model_copy(update={"head": bytes(32)})])
    assert str(agreement).startswith("the logs of 3 peers DIFFER")


def test_a_disagreement_is_not_forgotten() -> None:
    """A peer that forked and took the others' state later has forked all the same."""
    agreement = Agreement()
    agreement.observe([beat("a", 1, 7), beat("b", 1, 8)])
    agreement.observe([beat("b", 1, 7)])
    assert agreement.disagreements == (1,)


def test_rows(small_config: RunConfig) -> None:
    name = _short_name("12D3KooWabcdefgh")
    assert name == "…abcdefgh"
    row = row_of(beat("12D3KooWabcdefgh", 2), small_config)
    assert (row.name, row.cells) == (name, ("training", "3/4", "1,234", "2.500", "2/7", "02020202", "-"))
    assert plain_line(row).startswith("…abcdefgh: state training, inner step 3/4, tokens/s 1,234")
    assert row_of(beat("a", 7), small_config, "me").cells[0] == "finished"
    assert row_of(beat("a", 7, state=PeerState.READY), small_config).cells[0] == "ready"
    assert peers_table([row], "title").row_count == 1
