"""What a list of runs says of one."""

from __future__ import annotations

import json
from typing import Any

from opendiloco.config.run_config import RunConfig
from opendiloco.listed_run import ListedRun, Taken, taken_by
from opendiloco.run import Run
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from tests.opendiloco.test_screen import beat

TAKEN = Taken(6000, 10**9, 2 * 10**9, 3 * 10**9, 5 * 10**9, 10**6)


def test_a_run_says_who_is_there_and_what_it_takes(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    beats = [beat(PeerState.TRAINING, 2), beat(PeerState.ARCHIVING, 3), beat(PeerState.LEAVING, 1)]
    listed = ListedRun(run.run_id, run=run, heartbeats=beats, taken=TAKEN)
    plain = json.loads(json.dumps(listed.plain()))
    assert len(plain["peers"]) == 1
    assert (plain["outer_step"], plain["finished"], plain["problem"]) == (3, False, None)
    assert plain["needs"]["gpu_memory"] == 10**9
    lines = list(listed.lines())
    assert lines[0] == run.run_id
    assert f"outer step 3/{small_config.total_outer_steps} · 1" in lines[1]
    assert "takes 1 GB of a GPU" in lines[3]


def test_a_run_of_another_version_says_so() -> None:
    listed = ListedRun("tiny-abc", problem="the run is of protocol version 9")
    assert listed.plain() == {"run": "tiny-abc", "problem": "the run is of protocol version 9"}
    assert list(listed.lines()) == ["tiny-abc", "  the run is of protocol version 9"]


def test_a_strangers_words_do_not_rewrite_the_list(small_content: dict[str, Any]) -> None:
    words = "a\x1b[2J\x07\nofficial-run"
    content = small_content | {"data": {"source": words}, "model": {"path": f"./{words}", "digest": "0" * 64}}
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    lines = list(ListedRun(run.run_id, f"one\n  two {words}", run).lines())
    assert len(lines) == 4
    assert all(line.replace("\n", "").isprintable() for line in lines)
    assert "official-run" in lines[2]
    assert "\n" not in lines[2]


def test_what_a_run_takes_follows_from_its_model(small_config: RunConfig) -> None:
    taken = taken_by(Run.sign(small_config, Identity.generate()))
    assert 0 < taken.parameters < taken.traffic_each_way * 10 < taken.disk * 100
