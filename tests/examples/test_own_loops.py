"""Loops of other people's as peers of a real run: a plain torch loop, and transformers' Trainer."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest

from opendiloco.storage.run_folder import Journal
from tests.opendiloco.conftest import write_corpus
from tests.swarm.cli_processes import LOOPBACK, ROOT, Site, announce_run, bootstrap, create_run

pytestmark = pytest.mark.swarm
EXAMPLES = ROOT / "examples"


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_two_loops_and_a_volunteer_end_with_the_same_weights(tmp_path: Path) -> None:
    site = Site(tmp_path)
    corpus = str(write_corpus(tmp_path / "corpus"))
    run = site.write_run(corpus, outer_steps=3, inner_steps=4, peers=3)
    with bootstrap(site) as address:
        invite = announce_run(run, address)
        join = ("join", "--run", invite, "--identity", "one.pem", "--device", "cpu", "--data", corpus, *LOOPBACK)
        with (
            site.start(*join) as volunteer,
            site.start_script(EXAMPLES / "own_loop.py", str(run), invite, "--data", corpus) as own,
            site.start_script(EXAMPLES / "trainer_callback.py", str(run), invite, "--text", corpus) as trainer,
        ):
            volunteer.line("outer step 3 applied", "the run does not end")
            ended = [loop.finish() for loop in (own, trainer)]
            volunteer.signal(signal.SIGTERM)
            assert volunteer.finish().code == 0
    assert [loop.code for loop in ended] == [0, 0], ended[0].err + ended[1].err
    assert not [loop.err for loop in ended if "counted none" in loop.err]
    sums = {line for loop in ended for line in loop.out.splitlines() if line.startswith("the sum of all")}
    assert len(sums) == 1, sums
    assert ended[0].out.startswith("joining the run")
    steps = [line.split(":")[0] for line in ended[0].out.splitlines() if line.startswith("outer step")]
    assert steps == sorted(set(steps)), "each once, in order; it may have been too late for one"
    assert steps[-1] == "outer step 3"
    site.assert_nothing_is_left()


@pytest.mark.thorough
def test_loops_and_a_volunteer_in_a_run_that_streams_end_with_the_same_weights(tmp_path: Path) -> None:
    """What the loops have learned is in the run's entries."""
    site = Site(tmp_path)
    corpus = str(write_corpus(tmp_path / "corpus"))
    run = site.write_run(corpus, outer_steps=4, inner_steps=6, peers=3)
    streaming = "[streaming]\nlayers_per_fragment = 1\noverlap = 2\n\n[rounds]"
    run.write_text(run.read_text().replace("[rounds]", streaming))
    with bootstrap(site) as address:
        invite = create_run(site, run, address)
        join = ("join", "--run", invite, "--identity", "one.pem", "--device", "cpu", "--data", corpus, *LOOPBACK)
        with (
            site.start(*join, "--journal", "one.jsonl") as volunteer,
            site.start_script(EXAMPLES / "own_loop.py", str(run), invite, "--data", corpus) as own,
            site.start_script(EXAMPLES / "own_loop.py", str(run), invite, "--data", corpus) as other,
        ):
            volunteer.line("outer step 4 applied", "the run does not end")
            ended = [loop.finish() for loop in (own, other)]
            volunteer.signal(signal.SIGTERM)
            assert volunteer.finish().code == 0
    assert [loop.code for loop in ended] == [0, 0], ended[0].err + ended[1].err
    assert not [loop.err for loop in ended if "counted none" in loop.err]
    sums = {line for loop in ended for line in loop.out.splitlines() if line.startswith("the sum of all")}
    assert len(sums) == 1, sums
    assert max(len(header.roster) for header, _ in Journal(tmp_path / "one.jsonl")) == 3
    site.assert_nothing_is_left()


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate")
def test_loops_that_are_interrupted_leave_and_say_so(tmp_path: Path) -> None:
    """With the status of an interrupt, whatever torch runs at exit. Each is alone in a run of its own."""
    site = Site(tmp_path)
    corpus = str(write_corpus(tmp_path / "corpus"))
    run = site.write_run(corpus, inner_steps=4)
    with bootstrap(site) as address:
        invites = [announce_run(run, address) for _ in range(2)]
        with (
            site.start_script(EXAMPLES / "own_loop.py", str(run), invites[0], "--data", corpus) as own,
            site.start_script(EXAMPLES / "trainer_callback.py", str(run), invites[1], "--text", corpus) as trainer,
        ):
            own.line("outer step 2", "the loop does not train")
            trainer.line("loss", "the Trainer does not train")
            for loop in (own, trainer):
                loop.interrupt_terminal()
            for ended in (own.finish(), trainer.finish()):
                assert ended.code == 130, ended.err
                assert "Traceback" not in ended.err
    site.assert_nothing_is_left()
