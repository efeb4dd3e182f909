"""What people see of a volunteer: phases, how far they have come, the curve, and what was contributed."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.owner.watch import ASKED
from opendiloco.run import Run
from opendiloco.view.chronicle import Standing
from opendiloco.view.progress import (
    COMPILING,
    DOWNLOADING,
    FINISHED,
    LEGEND,
    OF_STATES,
    PREPARING,
    TRAINING,
    Fragments,
    OwnFacts,
    ProgressReader,
    ProgressReport,
    _curve,
    _explanations,
    _GrowthMeter,
    _healthy_line,
    _phase_of_stage,
    _progress_lines,
    _stage_line,
    _Work,
)
from opendiloco.view.run_view import RunView
from peers.driver.training import Sending
from peers.log.folder import RunLog
from peers.network.throttle import Caps
from peers.presence.heartbeat import Heartbeat, HeldOutLoss, PeerState
from peers.protocol.states import State
from peers.transfer.download import Download
from peers.values.identity import Identity
from peers.values.wire import Reach
from tests.opendiloco.view.test_agreement import beat

RELAY = "/dns4/node.example/tcp/1/p2p/X"


def own_beat(peer: str = "a", **said: Any) -> Heartbeat:
    known: dict[str, Any] = {
        "index": 12,
        "inner_step": 50,
        "loss": 2.5,
        "tokens_per_second": 12345.6,
        "relays": (RELAY,),
    }
    return beat(peer, 12).model_copy(update=known | said)


@pytest.fixture
def progress(small_config: RunConfig) -> ProgressReport:
    changes = {"outer_steps": 40, "training": {"inner_steps": 200}}
    run = Run.sign(small_config.changed(changes), Identity.generate())
    beats = own_beat(held_out=HeldOutLoss(index=8, loss=2.31)), *map(own_beat, ("b", "c", "unknown"))
    reach = {"b": Reach.RELAYED, "c": Reach.OPEN, "gone": Reach.NONE}
    log, caps, traffic = RunLog(run.settings.empty_log), Caps(upload=20e6 / 8), (3_400_000, 12_000_000_000)
    purposes = {
        "rounds": (1_000_000, 7_000_000_000),
        "measuring": (400_000, 1_000_000_000),
        "serving": (2_000_000, 4_000_000_000),
    }
    facts = OwnFacts(beats, log, State.TRAINING, False, reach, caps, *traffic, purposes)
    return ProgressReport(
        view=RunView(run, facts.heartbeats),
        facts=facts,
        phase=TRAINING,
        work=_Work(0.25, 20.0),
        losses=(4.0, 3.0, 2.5),
        contribution=Standing(tokens=1_234_000, rounds=11, share=0.34, rank=2, peers=5),
        up=1e6 / 8,
        down=2e6 / 8,
        until=datetime(2026, 11, 24, 7, 30),
        machine="61 °C",
    )


@pytest.mark.parametrize(
    ("stage", "phase"),
    [
        ("finding the run", "finding the run"),
        ("importing torch", "starting the workers"),
        ("checking this machine", "checking this machine"),
        ("tokenizing stdlib", PREPARING),
        ("checking /tokens", PREPARING),
        ("compiling", COMPILING),
    ],
)
def test_each_stage_of_the_start_has_its_phase(stage: str, phase: str) -> None:
    assert _phase_of_stage(stage) == phase


def test_a_stage_says_how_far_it_has_come_and_how_long_yet() -> None:
    assert _stage_line("tokenizing c4", _Work(0.2, 10)) == "preparing data: tokenizing c4 20%, about 40 s left"
    assert _stage_line("compiling", _Work(None, 65)) == "compiling (65 s)"
    assert _stage_line("finding the run", _Work(None, 0.4)) == "finding the run"


def test_every_state_of_a_peer_has_a_phase() -> None:
    assert set(OF_STATES) == set(State)


def test_a_healthy_line_has_all_that_matters(progress: ProgressReport) -> None:
    assert _healthy_line(progress) == (
        "outer step 12/40, training, inner step 50/200, next round in 60 s, loss 2.500, 12,346 tokens/s, 4 peers, "
        "reachable: NAT (links: 1 open, 1 relayed), 1.23 M tokens in 11 rounds: 34%, rank 2 of 5, "
        "1.0 of 20 Mbit/s up, 2.0 Mbit/s down, 61 °C"
    )


def test_the_screen_fits_80_columns(progress: ProgressReport) -> None:
    lines = _progress_lines(progress)
    assert lines == [
        "outer step 12/40 · training, inner step 50/200, next round in 60 s",
        "loss 2.500 █▃▁",
        "held-out loss 2.310 (perplexity 10.1) after outer step 8",
        "12,346 tokens/s · 4 peers · reachable: NAT (links: 1 open, 1 relayed)",
        "contributed 1.23 M tokens in 11 rounds: 34%, rank 2 of 5",
        "up 1.0 of 20 Mbit/s (3.4 MB) · down 2.0 Mbit/s (12 GB)",
        "this machine: 61 °C",
    ]
    explained = _explanations(replace(progress, pause_reasons=("on battery",)))
    assert explained == [
        "rounds ↑1 MB ↓7 GB · measuring ↑400 kB ↓1 GB · serving ↑2 MB ↓4 GB",
        "leaves at 07:30",
        "`diloco-peer resume --anyway` continues",
        "Ctrl-C leaves; in another terminal: diloco-peer pause, resume, finish",
    ]
    assert "`diloco-peer resume` continues" in _explanations(replace(progress, pause_reasons=(ASKED,)))
    assert max(map(len, [*lines, *explained, LEGEND])) <= 80


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (
            [("b", PeerState.TRAINING, 12), ("z", PeerState.ARCHIVING, 12)],
            "you may leave: the model is with 1 archive and 1 other",
        ),
        ([("b", PeerState.TRAINING, 11)], "please stay: no other machine has the model yet"),
    ],
)
def test_a_run_that_is_over_says_whether_to_stay(
    progress: ProgressReport, others: list[tuple[str, PeerState, int]], said: str
) -> None:
    """Regression: who waited beside a finished run was told that it waited for the others."""
    beats = [own_beat(), *(own_beat(peer, state=state, index=index) for peer, state, index in others)]
    view = RunView(progress.view.run, beats)
    over = replace(progress, view=view, facts=replace(progress.facts, heartbeats=beats), phase=FINISHED)
    assert any(line.startswith(said) for line in _progress_lines(over))
    assert said in _healthy_line(over)


def test_the_months_traffic_is_shown_beside_its_limits(progress: ProgressReport) -> None:
    limited = replace(progress, month=("this month (UTC): up 1 GB of 2 GB", "near the limit"))
    assert _progress_lines(limited)[-3:-1] == list(limited.month)
    assert ", this month (UTC): up 1 GB of 2 GB, near the limit, " in _healthy_line(limited)
    assert limited.plain()["month"] == list(limited.month)


def test_that_it_trains_uncompiled_stays_on_the_screen(progress: ProgressReport) -> None:
    uncompiled = replace(progress, facts=replace(progress.facts, uncompiled="fatal error: Python.h " * 9))
    lines = _progress_lines(uncompiled)
    at = lines.index("not compiling, which would be faster:")
    assert lines[at + 1].startswith("  fatal error: Python.h")
    assert max(map(len, lines)) <= 80
    assert ", not compiled, 4 peers, " in _healthy_line(uncompiled)
    assert uncompiled.plain()["uncompiled"] == "fatal error: Python.h " * 9
    assert progress.plain()["uncompiled"] is None


STREAMING = Fragments(count=9, averaging=2, done=3, overlap=5)


@pytest.mark.parametrize(
    ("fragments", "said"),
    [
        (STREAMING, "averages merged after 5 steps"),
        (replace(STREAMING, longest=1.23), "averages in 1.2 s, merged after 5 steps"),
        (
            replace(STREAMING, longest=12.3, overlap=1, late=4, wait_share=0.21),
            "averages in 12.3 s, merged after 1 step, 4 late (21%)",
        ),
    ],
)
def test_a_run_that_streams_says_whether_training_waits_for_averages(
    progress: ProgressReport, fragments: Fragments, said: str
) -> None:
    streaming = replace(progress, facts=replace(progress.facts, fragments=fragments))
    lines = _progress_lines(streaming)
    assert lines[4:6] == ["2 of 9 fragments averaging, 3 done", said]
    assert max(map(len, lines)) <= 80
    assert f", 12,346 tokens/s, {said}, 4 peers, " in _healthy_line(streaming)


def test_a_download_names_its_donors_and_rate(progress: ProgressReport) -> None:
    facts = replace(progress.facts, download=cast(Download, SimpleNamespace(fetched={"b": 2, "c": 3})))
    downloading = replace(progress, facts=facts, phase=DOWNLOADING, work=_Work(0.5, 30), down=80e6 / 8)
    expected = "outer step 12/40 · downloading the state from 2 donors at 80.0 Mbit/s 50%, about 30 s left"
    assert _progress_lines(downloading)[0] == expected


@pytest.mark.parametrize(
    ("sending", "shown"),
    [
        (Sending(0, 1e5, 250e3, 1.0), []),
        (Sending(0, 1e6, 0.0, 2.0), []),
        (Sending(0, 1e6, 1e6, 2.0), ["uplink 8 Mbit/s: sending int8, 1 s of 2 s"]),
        (Sending(1, 1e5, 250e3, 1.0), ["uplink 2 Mbit/s: sending e2m1, 0 s of 1 s"]),
    ],
    ids=["little data", "not measured", "much data", "a thinner format"],
)
def test_the_uplink_is_shown_when_it_costs_time_or_bits(
    progress: ProgressReport, sending: Sending, shown: list[str]
) -> None:
    """Regression: a round of little data measures no uplink, and showed 2 Mbit/s of a link with 1,200."""
    changes = {"codec": {"kind": "int8", "contributions": ["int8", "e2m1"]}}
    run = Run.sign(progress.view.run.config.changed(changes), Identity.generate())
    view = RunView(run, progress.facts.heartbeats)
    sent = replace(progress, facts=replace(progress.facts, sending=sending), view=view)
    assert [line for line in _progress_lines(sent) if line.startswith("uplink")] == shown


def test_a_pause_says_why(progress: ProgressReport) -> None:
    paused = replace(progress, pause_reasons=("on battery", "game runs"))
    assert _progress_lines(paused)[0] == "outer step 12/40 · paused: on battery, game runs"


@pytest.mark.parametrize("fragments", [None, replace(STREAMING, wait_share=0.5)])
def test_the_next_round_is_as_far_as_the_speed_says_however_many_outer_steps_the_screen_has_missed(
    progress: ProgressReport, fragments: Fragments | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where rounds are shorter than the time between two updates, training seemed to be one phase."""
    beats = [own_beat(index=12), own_beat(index=40, inner_step=0), own_beat(index=40, tokens_per_second=0.0)]
    given = replace(progress.facts, fragments=fragments)
    facts = iter([replace(given, heartbeats=[own]) for own in (beats[0], *beats)])
    reader = ProgressReader(progress.view.run, lambda: next(facts), tuple)
    reader.read()
    now = time.monotonic()
    monkeypatch.setattr("opendiloco.view.progress.time.monotonic", lambda: now + 60)
    training = progress.view.run.config.training
    expected = 150 * training.batch_size * training.sequence_length / 12345.6 * (2 if fragments else 1)
    assert reader.read().work.left == pytest.approx(expected)
    assert [reader.read().work.left for _ in beats[1:]] == [None, None]


@pytest.mark.parametrize(
    ("values", "bars"),
    [([1.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, 7.0], "▁█"), ([0.0, 1.0, 6.0, 7.0], "▁█"), (range(8), "▁█")],
)
def test_a_curve_has_means_where_it_has_no_room(values: list[float], bars: str) -> None:
    assert _curve(list(values), width=2) == bars


def test_a_rate_is_that_of_the_last_seconds() -> None:
    meter = _GrowthMeter()
    assert meter.rate(100, 0.0) == 0
    assert meter.rate(300, 2.0) == 100
    for second in range(3, 11):
        meter.rate(300, float(second))
    assert meter.rate(300, 11.0) == 0


def test_programs_get_plain_values(progress: ProgressReport) -> None:
    plain = json.loads(json.dumps(progress.plain()))
    assert plain["contribution"] == {"tokens": 1_234_000, "rounds": 11, "share": 0.34, "rank": 2, "peers": 5}
    assert plain["links"] == {"open": 1, "relayed": 1}
    assert (plain["phase"], plain["seconds_left"], plain["sent_bytes"]) == ("training", 60.0, 3_400_000)
