"""What a list of runs says of one."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from opendiloco.cli import status
from opendiloco.cli.status import NOT_MEASURED
from opendiloco.cli.status import _ListedRun as ListedRun
from opendiloco.config.run_config import RunConfig
from opendiloco.dashboard.watching import RunHistory
from opendiloco.quantities import in_words
from opendiloco.run import Run
from opendiloco.tools.doctor.examination import _check_run
from opendiloco.view.run_view import RunView
from opendiloco.workers.needs import Needs
from peers.errors import ManifestError
from peers.presence.heartbeat import PeerState
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from tests.opendiloco.view.test_screen import beat


def test_a_run_says_who_is_there_and_what_it_takes(small_config: RunConfig) -> None:
    run = Run.sign(small_config, Identity.generate())
    beats = [beat(PeerState.TRAINING, 2), beat(PeerState.ARCHIVING, 3), beat(PeerState.LEAVING, 1)]
    needs = status._needs_here(run)
    listed = ListedRun(run.run_id, view=RunView(run, beats), needs=needs)
    plain = json.loads(json.dumps(listed.plain()))
    assert len(plain["peers"]) == 1
    assert (plain["outer_step"], plain["finished"], plain["problem"]) == (2, False, None)
    assert plain["needs"]["gpu_memory"] == needs.device_memory
    lines = list(listed.lines())
    assert lines[0] == run.run_id
    assert f"outer step 2/{small_config.total_outer_steps} · 1" in lines[1]
    assert lines[3] == "  to join, add --data FOLDER", "regression: the line that was typed lacked it"
    assert f"needs a GPU with {in_words(needs.device_memory)}" in lines[4]


def test_a_run_of_another_version_says_so() -> None:
    listed = ListedRun("tiny-abc", problem="the run is of protocol version 9")
    assert listed.plain() == {"run": "tiny-abc", "problem": "the run is of protocol version 9"}
    assert list(listed.lines()) == ["tiny-abc", "  the run is of protocol version 9"]


def test_a_manifest_may_leave_defaults_out(small_content: dict[str, Any]) -> None:
    """Regression: one such run left all others unlisted."""
    content = small_content | {"model": {"config": small_content["model"]["config"]}}
    manifest = SignedManifest.create(Identity.generate(), "small", content)
    listed = ListedRun(manifest.run_id, view=RunView(Run.from_manifest(manifest), ()))
    assert listed.plain()["model"] == "llama"


ABOUT = {
    "title": "Verse",
    "description": "A model of verse.",
    "licence": "cc0-1.0",
    "link": "https://example.org/verse",
}


def test_a_run_says_what_it_is_for(small_content: dict[str, Any]) -> None:
    run = Run.sign(RunConfig.from_manifest_content(small_content | {"about": ABOUT}), Identity.generate())
    listed = ListedRun(run.run_id, view=RunView(run, ()))
    said = ["Verse: A model of verse.", "licence cc0-1.0 · https://example.org/verse"]
    assert list(listed.lines())[2:4] == [f"  {line}" for line in said]
    assert listed.plain()["about"] == ABOUT | {"contact": None}
    assert "; ".join(said) in _check_run(RunView(run, ())).found
    history = RunHistory(run, addresses=("/ip4/192.0.2.2/tcp/1/p2p/A", "/ip4/192.0.2.3/tcp/1/p2p/B"))
    shown = history.sections()["run"]
    assert (shown["about"], shown["join"]) == (
        said,
        f"diloco-peer join diloco:{run.run_id}@/ip4/192.0.2.2/tcp/1/p2p/A,/ip4/192.0.2.3/tcp/1/p2p/B --data FOLDER",
    )
    assert RunHistory(run).sections()["run"]["join"] == ""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("title", "a\nb", "has line breaks or control characters. Write it in one line."),
        ("description", "\x1b[2J", "has line breaks or control characters"),
        ("licence", "a" * 501, "too long. Use at most 500 characters."),
        ("link", "javascript:alert(1)", "not the address of a web page. Use one such as https://example.org/run."),
    ],
)
def test_words_about_a_run_that_are_refused(key: str, value: str, said: str, small_content: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(small_content | {"about": {key: value}})
    assert f"about.{key} = " in str(caught.value)
    assert said in str(caught.value)


def test_the_page_of_a_run_by_invitation_names_all_that_join_needs(small_content: dict[str, Any]) -> None:
    """Regression: the line on the page lacked `--data`."""
    run = Run.sign(
        RunConfig.from_manifest_content(small_content | {"admission": {"mode": "invite"}}), Identity.generate()
    )
    shown = RunHistory(run, addresses=("/ip4/192.0.2.2/tcp/1/p2p/A",)).sections()["run"]
    assert shown["join"].endswith("/p2p/A --ticket TICKET --data FOLDER")


def test_a_strangers_words_do_not_rewrite_the_list(small_content: dict[str, Any]) -> None:
    words = "a\x1b[2J\x07\nofficial-run"
    content = small_content | {"data": {"source": words}, "model": {"path": f"./{words}", "digest": "0" * 64}}
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    lines = list(ListedRun(run.run_id, f"one\n  two {words}", RunView(run, ())).lines())
    assert len(lines) == 5
    assert all(line.replace("\n", "").isprintable() for line in lines)
    assert "official-run" in lines[2]
    assert "\n" not in lines[2]


def test_slow_runs_keep_the_others_waiting_for_a_bounded_time(
    small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a list of many was silent for minutes."""
    time, run = 1000.0, Run.sign(small_config, Identity.generate())
    needs = status._needs_here(run)

    def measure(run: Run) -> Needs:
        nonlocal time
        time += 12.0
        return needs

    monkeypatch.setattr(status, "_needs_here", measure)
    listed = [ListedRun(f"run-{number}", view=RunView(run, ())) for number in range(6)]
    plain = [each.plain() for each in status._with_needs([*listed, ListedRun("gone", "it is gone")], lambda: time)]
    assert [each.get("needs") is not None for each in plain] == [True] * 3 + [False] * 4
    assert [each["problem"] for each in plain] == [None] * 3 + [NOT_MEASURED] * 3 + ["it is gone"]
    assert time == 1036.0


def test_runs_are_listed_without_torch(small_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the command failed as soon as a node knew a run."""
    listed = ListedRun("run-1", view=RunView(Run.sign(small_config, Identity.generate()), ()))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "opendiloco.model.build", raising=False)
    [each] = status._with_needs([listed])
    assert each.needs is None
    assert each.problem == "needs are not computed: the Python package torch is missing here"
    assert "".join(each.lines())


def test_what_a_run_takes_follows_from_its_model(small_config: RunConfig) -> None:
    needs = status._needs_here(Run.sign(small_config, Identity.generate())).plain()
    assert 0 < needs["parameters"] < needs["traffic_each_way"] * 10 < needs["disk"] * 100
