"""What a dashboard says of a run, from invented heartbeats and entries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from opendiloco.dashboard.watching import MOST_POINTS, REMEMBERED_SECONDS, SHOWN_SPANS, RunHistory, _Curve, _Timeline
from opendiloco.storage import run_folder
from opendiloco.storage.run_folder import HeldOutCurve
from opendiloco.view import chronicle
from opendiloco.view.chronicle import Chronicle
from opendiloco.view.run_view import LARGEST_LOSS, LARGEST_RATE, RunView
from peers.log.folder import RunLog
from peers.presence.heartbeat import HeldOutLoss, PeerState
from peers.values.wire import digest_of
from tests.opendiloco.dashboard.invented import (
    AMENDED,
    HOSTILE,
    IDENTITIES,
    NOW,
    PEERS,
    TEAM,
    InventedLog,
    Story,
    invented_run,
    said,
)
from tests.opendiloco.training.recorded_run import amendment


@pytest.fixture(scope="module")
def story() -> Story:
    return Story(14)


def read(log: RunLog) -> Chronicle:
    found = Chronicle()
    while found.read(log):
        pass
    return found


# The log --------------------------------------------------------------------------------------------------------
def test_entries_say_who_does_not_count_and_why(story: Story) -> None:
    found = {record.index: record for record in read(story.invented.log).records}
    kinds = {index: [(one.peer, one.kind) for one in record.absent] for index, record in found.items() if record.absent}
    assert kinds == {6: [(PEERS[2], "unready")], 9: [(PEERS[2], "partly")], 11: [(PEERS[2], "gone")]}
    assert "was absent from most chunks: its samples are trained again" in found[9].absent[0].why
    assert found[2].joined == (PEERS[3],)
    assert 4 * found[9].tokens == 13 * found[0].tokens // 3, "of the dead one a quarter counts"


def test_entries_say_how_many_have_signed_them(story: Story) -> None:
    records = read(story.invented.log).records
    first, died = records[0].signatures, records[9].signatures
    assert first is not None
    assert died is not None
    assert (first.signed, first.voters, first.certified) == (2, 3, True)
    assert (died.signed, died.voters, died.certified) == (3, 4, True)


def test_an_amendment_is_told_of_the_entry_that_takes_it_in(story: Story) -> None:
    found = sections(view_of(story))
    assert {row["index"]: row["change"] for row in found["rounds"]["rows"] if row["change"]} == {
        AMENDED: {
            "number": 1,
            "values": "outer learning rate 0.5 instead of 0.7, outer momentum 0.8 instead of 0.6",
        }
    }
    assert found["run"]["amended"] == ["in force: amendment 1 (outer learning rate 0.5, outer momentum 0.8)"]


def test_what_is_in_force_says_the_log_and_only_without_one_the_peers(story: Story) -> None:
    run, end = story.run, story.invented.end
    other = amendment(run, 2, IDENTITIES[0], outer_learning_rate=0.1)
    forged = amendment(run, 3, IDENTITIES[1], outer_learning_rate=0.2)
    told = []
    for log in (story.invented.log, None):
        view = RunHistory(run)
        view.observe([said(run, end, PEERS[0], amendment=other), said(run, end, PEERS[1], proposed=forged)], NOW)
        while view.read(log):
            pass  # a slice of it at a time
        told.append(sections(view)["run"]["amended"])
    first, second = "amendment 1 (outer learning rate 0.5, outer momentum 0.8)", "amendment 2 (outer learning rate 0.1)"
    assert told == [[f"in force: {first}", f"waits for an entry: {second}"], [f"in force: {second}"]]


def test_contributions_are_the_tokens_that_count(story: Story) -> None:
    found = read(story.invented.log)
    lease = found.records[0].tokens // 3
    # In 14 entries the first two peers are in all; the third misses one, dies in one and is gone from the eleventh on.
    assert [found.contributions[peer].tokens / lease for peer in PEERS[:4]] == [14, 14, 9.25, 12]
    assert found.tokens == lease * 49.25 == story.invented.end.lineage_tokens


def test_a_long_log_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronicle, "SLICE_SECONDS", 0.0)
    invented, found = InventedLog(invented_run()), Chronicle()
    for _ in range(4):
        invented.add(PEERS[:2])
    assert [(found.read(invented.log), found.next_index) for _ in range(5)] == [
        (True, 1),
        (True, 2),
        (True, 3),
        (False, 4),
        (False, 4),
    ]
    assert found.contributions[PEERS[0]].entries == 4


def test_another_lineage_is_read_anew() -> None:
    run = invented_run()
    ours, theirs, found = InventedLog(run), InventedLog(run), Chronicle()
    for _ in range(3):
        ours.add(PEERS[:2])
        theirs.add(PEERS[1:4])
    for log in (ours.log, theirs.log):
        while found.read(log):
            pass
    assert set(found.contributions) == set(PEERS[1:4])
    assert found.contributions[PEERS[1]].entries == 3


def test_what_is_not_known_of_an_entry_is_taken_up_later() -> None:
    run, found = invented_run(), Chronicle()
    whole = InventedLog(run)
    header = whole.add(PEERS[:3])
    log = RunLog(run.settings.empty_log, 0)
    log.append(header, None, None)
    found.read(log)
    assert found.records[0].signatures is None
    log.append(header, digest_of(b"state 0"), None, whole.log.certificate_at(0))
    found.read(log)
    assert found.records[0].signatures is not None
    assert found.records[0].state_digest == digest_of(b"state 0")


def test_a_log_without_its_beginning_says_from_where_it_counts() -> None:
    run = invented_run()
    whole = InventedLog(run)
    for _ in range(4):
        whole.add(PEERS[:3])
    log = RunLog(run.settings.empty_log, 0)
    for index in (2, 3):
        header = whole.log.header_at(index)
        assert header is not None
        log.append(header, None, None, whole.log.certificate_at(index))
    found = read(log)
    assert [record.index for record in found.records] == [2, 3]
    assert found.first == 2
    assert found.records[0].signatures is None, "who could sign it is not known"
    assert found.records[1].signatures is not None


# Heartbeats -----------------------------------------------------------------------------------------------------
def view_of(story: Story, looks: int = 2) -> RunHistory:
    view = RunHistory(story.run, me=PEERS[0])
    for look in range(looks):
        view.observe(asyncio.run(story.heartbeats()), NOW + 2.0 * look)
        while view.read(story.invented.log):
            pass  # a slice of it at a time
    return view


def sections(view: RunHistory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(view.sections(), allow_nan=False))
    return found


def test_the_whole_view_is_plain_values(story: Story) -> None:
    found = sections(view_of(story))
    assert set(found) == {"run", "peers", "losses", "rounds", "contributions"}
    run = found["run"]
    assert (run["outer_step"], run["outer_steps"], run["peers"], run["archives"]) == (14, 40, 3, 1)
    assert run["lineage_tokens"] == story.invented.end.lineage_tokens
    assert run["no_log"] == ""
    assert run["disagreements"] == []
    rows = found["peers"]["rows"]
    assert [row["peer"] for row in rows] == [PEERS[0], PEERS[1], PEERS[3], PEERS[5]], "this machine, then by tokens"
    assert [row["reach"] for row in rows][:2] == ["open", "NAT"]
    assert rows[1]["relayed"] == 1
    assert rows[2]["trouble"] == HOSTILE, "text is told as it is; the page shows it as text"
    assert rows[0]["share"] == pytest.approx(14 / 49.25)
    assert found["contributions"]["rows"][0]["entries"] == 14
    assert found["losses"]["held_out"][0][0] == 14
    assert len(found["rounds"]["rows"]) == 14


def test_teams_have_what_their_peers_have_contributed_also_when_these_are_gone(story: Story) -> None:
    view, found = view_of(story), read(story.invented.log).contributions
    both = found[PEERS[1]].tokens + found[PEERS[3]].tokens
    contributions = sections(view)["contributions"]
    assert {row["peer"] for row in contributions["rows"] if row["team"] == TEAM} == {PEERS[1], PEERS[3]}
    assert contributions["teams"] == [{"team": TEAM, "tokens": both, "peers": 2}]
    end = story.invented.end
    view.observe([said(story.run, end, PEERS[0], 9, team="b"), said(story.run, end, PEERS[4], 9, team="c")], NOW + 1e6)
    teams = sections(view)["contributions"]["teams"]
    assert [(row["team"], row["peers"]) for row in teams] == [(TEAM, 2), ("b", 1)], "who contributed nothing is in none"
    view.observe([said(story.run, end, PEERS[1], 10)], NOW + 1e6)
    assert [row["peers"] for row in sections(view)["contributions"]["teams"]] == [1, 1], "one is in none any more"


def test_what_is_not_known_is_said() -> None:
    run = invented_run()
    found = sections(RunHistory(run, no_log="This node keeps no log."))
    assert found["run"]["no_log"] == "This node keeps no log."
    assert found["run"]["looked_at"] is None
    assert (found["run"]["outer_step"], found["run"]["lineage_tokens"]) == (None, None), "regression: a false 0"
    assert found["peers"] == {"rows": [], "more": 0}
    assert found["losses"] == {"training": [], "held_out": []}


def test_a_peer_that_is_gone_is_shown_for_a_while(story: Story) -> None:
    view = view_of(story)
    beats = asyncio.run(story.heartbeats())
    view.observe(beats[:1], NOW + 10)
    rows = {row["peer"]: row for row in sections(view)["peers"]["rows"]}
    assert rows[PEERS[1]]["state"] == "gone"
    assert rows[PEERS[1]]["seen"] == NOW + 2
    view.observe(beats[:1], NOW + 3 + REMEMBERED_SECONDS)
    assert len(sections(view)["peers"]["rows"]) == 1


def test_fewer_than_half_of_the_peers_can_neither_draw_the_curve_nor_set_the_step(story: Story) -> None:
    run, end = story.run, story.invented.end
    honest = [said(run, end, peer, loss=2.0 + place / 10) for place, peer in enumerate(PEERS[:3])]
    liars = [
        said(run, end, peer, index=10**9, loss=1e300, held_out=HeldOutLoss(index=10**9, loss=-5.0))
        for peer in PEERS[3:5]
    ]
    view = RunHistory(run)
    view.observe([*honest, *liars], NOW)
    found = sections(view)
    assert found["run"]["outer_step"] == 14
    assert [loss for _, loss in found["losses"]["training"]] == [2.1]
    assert found["losses"]["held_out"] == []
    view.observe([said(run, end, PEERS[0], 2, held_out=HeldOutLoss(index=12, loss=1e9))], NOW)
    assert sections(view)["losses"]["held_out"] == [[12, LARGEST_LOSS]]


def test_peers_with_other_digests_are_named(story: Story) -> None:
    run, end = story.run, story.invented.end
    other: dict[str, Any] = {"state_digest": digest_of(b"another state")}
    beats = [said(run, end, peer, **(other if place == 2 else {})) for place, peer in enumerate(PEERS[:3])]
    assert RunView(run, beats).agreement.minorities == {PEERS[2]}
    assert RunView(run, beats[1:]).agreement.minorities == {PEERS[1], PEERS[2]}, "of two nobody can say who is right"
    view = RunHistory(run)
    view.observe(beats, NOW)
    assert sections(view)["run"]["disagreements"] == [14]


def test_a_farewell_is_no_presence(story: Story) -> None:
    view = RunHistory(story.run)
    view.observe([said(story.run, story.invented.end, PEERS[0], state=PeerState.LEAVING)], NOW)
    assert sections(view)["run"]["peers"] == 0


# Time -----------------------------------------------------------------------------------------------------------
def test_steps_take_as_long_as_was_seen() -> None:
    timeline = _Timeline()
    for at, step, is_averaging in ((0, 3, False), (5, 4, False), (20, 4, True), (22, 4, True), (25, 5, False)):
        timeline.observe(step, is_averaging, 3, NOW + at)
    assert timeline.spans[3].seconds is None, "nobody here saw it begin"
    assert timeline.spans[4][1:] == (20.0, 5.0, 3)
    assert timeline.usual_seconds == 20.0
    timeline.observe(9, False, 3, NOW + 30)
    assert timeline.spans[8].seconds is None, "several at once"
    timeline.observe(4, False, 3, NOW + 31)
    assert set(timeline.spans) == {3}, "another lineage"


def test_a_run_of_years_takes_bounded_room() -> None:
    timeline, curve = _Timeline(), _Curve(0.25)
    for step in range(3 * MOST_POINTS):
        timeline.observe(step, False, 3, NOW + step)
        curve.add(step, step)
    assert len(timeline.spans) == SHOWN_SPANS
    points = curve.points
    assert MOST_POINTS / 3 < len(points) <= MOST_POINTS
    assert points == sorted(points)
    assert points[-1][1] == pytest.approx(3 * MOST_POINTS, rel=0.01)


# Numbers that others make up ------------------------------------------------------------------------------------
def test_rates_that_no_machine_has_can_still_be_added_up(story: Story) -> None:
    view = RunHistory(story.run)
    view.observe([said(story.run, story.invented.end, peer, tokens_per_second=1e308) for peer in PEERS[:2]], NOW)
    assert sections(view)["run"]["tokens_per_second"] == 2 * LARGEST_RATE


def test_two_huge_losses_do_not_spoil_the_curve_for_good(story: Story) -> None:
    view = RunHistory(story.run)
    view.observe([said(story.run, story.invented.end, peer, loss=-1.7e308) for peer in PEERS[:2]], NOW)
    assert [loss for _, loss in sections(view)["losses"]["training"]] == [-LARGEST_LOSS]
    view.observe([said(story.run, story.invented.end, PEERS[0], held_out=HeldOutLoss(index=12, loss=-1e308))], NOW)
    assert sections(view)["losses"]["held_out"] == [[12, -LARGEST_LOSS]]


def test_no_outer_step_is_shown_that_the_run_does_not_have(story: Story) -> None:
    view = RunHistory(story.run)
    far = said(story.run, story.invented.end, PEERS[0], index=2**61, held_out=HeldOutLoss(index=2**60, loss=2.0))
    view.observe([far], NOW)
    found = sections(view)
    assert found["run"]["outer_step"] == found["peers"]["rows"][0]["outer_step"] == 40
    assert found["losses"]["held_out"] == []


def test_held_out_losses_take_bounded_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_folder, "MOST_LOSSES", 3)
    curve = HeldOutCurve(tmp_path / "held_out.jsonl")
    assert [curve.add(step, 2.0) for step in range(5)] == [True, True, True, False, False]
    assert len(HeldOutCurve(tmp_path / "held_out.jsonl").losses) == 3
