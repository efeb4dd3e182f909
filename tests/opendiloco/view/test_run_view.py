"""What the view of a run says, whoever shows it."""

from __future__ import annotations

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.view.run_view import LARGEST_RATE, RunView, plain_peer, row_of
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.manifest import Amendment
from tests.opendiloco.training.recorded_run import amendment
from tests.opendiloco.view.test_agreement import beat

ORGANISER = Identity.generate()


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, ORGANISER)


def test_fewer_than_half_of_the_peers_cannot_say_that_a_run_is_further_on_or_finished(run: Run) -> None:
    """Regression: one peer could set the outer step that `runs` lists, and end the run there and on the dashboard."""
    view = RunView(run, [beat("a", 2), beat("b", 3), beat("c", run.config.total_outer_steps)])
    assert (view.outer_step, view.is_finished) == (3, False)
    done = [beat(peer, run.config.total_outer_steps) for peer in "ab"]
    assert RunView(run, [*done, beat("c", 2)]).is_finished


def test_a_run_is_as_long_as_the_amendment_in_force_says(run: Run) -> None:
    longer = amendment(run, 1, ORGANISER, outer_steps=9)
    beats = [beat(peer, 7).model_copy(update={"amendment": longer}) for peer in "ab"]
    view = RunView(run, beats)
    assert (view.outer_steps, view.is_finished, row_of(beats[0], run.config).cells[4]) == (9, False, "7/9")
    assert RunView(run, [one.model_copy(update={"index": 9}) for one in beats]).is_finished
    forged = amendment(run, 1, Identity.generate(), outer_steps=9)
    assert RunView(run, [beat(peer, 7).model_copy(update={"amendment": forged}) for peer in "ab"]).is_finished
    later = Amendment.sign(run.run_id, 2, b'{"outer_hours":9}', ORGANISER)
    assert RunView(run, [beat("a", 3).model_copy(update={"amendment": later})]).outer_steps == 7


def test_without_anybody_at_work_a_run_is_as_far_as_is_known(run: Run) -> None:
    assert RunView(run, []).outer_step == 0
    assert RunView(run, [beat("a", 0, state=PeerState.JOINING)], step_before=4).outer_step == 4
    assert RunView(run, [beat("a", 5, state=PeerState.ARCHIVING)], step_before=4).outer_step == 5


def test_who_leaves_is_not_there_and_an_archive_does_not_train(run: Run) -> None:
    beats = [beat("a", 2), beat("b", 2, state=PeerState.LEAVING), beat("c", 2, state=PeerState.ARCHIVING)]
    view = RunView(run, beats)
    assert [one.peer for one in view.peers] == ["a", "c"]
    assert [one.peer for one in view.trainers] == ["a"]
    assert view.tokens_per_second == 1234.5


def test_numbers_are_bounded_before_they_are_shown_or_added_up(run: Run) -> None:
    claimed = {"index": 2**61, "tokens_per_second": 1e308, "loss": -1e308}
    view = RunView(run, [beat(peer, 2).model_copy(update=claimed) for peer in "ab"])
    assert view.tokens_per_second == 2 * LARGEST_RATE
    said = plain_peer(view.peers[0], run.config)
    assert (said["outer_step"], said["tokens_per_second"], said["loss"]) == (view.outer_steps, LARGEST_RATE, -100.0)
