"""What `join` makes of its settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.cli.join import _Joining, _owners_watch
from opendiloco.cli.logs import PLACE
from opendiloco.cli.options import SettingsCommand, join_settings
from opendiloco.owner.controls import OwnerRequest
from opendiloco.owner.facts import Facts
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.view.progress import Lines
from opendiloco.volunteer.identity import hold_identity
from opendiloco.volunteer.volunteer import Session
from peers.values.identity import Identity
from peers.values.manifest import Invite


@pytest.mark.parametrize("typed", [["INVITE"], ["--run", "INVITE"], ["--plain", "INVITE", "--hours", "22-7"]])
def test_the_invite_may_stand_alone(typed: list[str]) -> None:
    """Regression: `join INVITE` was wrong usage."""
    given: dict[str, object] = {}

    @click.command(cls=SettingsCommand)
    @join_settings()
    def show(settings: JoinSettings) -> None:
        given.update(run=settings.run, hours=settings.hours)

    done = CliRunner().invoke(show, typed)
    assert done.exit_code == 0, done.output
    assert given == {"run": "INVITE", "hours": "22-7" if "--hours" in typed else given["hours"]}
    assert "Usage: show [OPTIONS] [INVITE]" in CliRunner().invoke(show, ["--help"]).output
    assert CliRunner().invoke(show, ["INVITE", "AGAIN"]).exit_code == 2


@pytest.mark.parametrize("command", ["join", "doctor"])
def test_an_address_of_metrics_needs_their_port(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: --metrics-host alone was ignored. In a configuration file it stands for any `join`."""
    refused = CliRunner().invoke(main, [command, "tiny-" + "a" * 32, "--metrics-host", "0.0.0.0"])
    assert refused.exit_code == 2
    assert "--metrics-host is the address of metrics: give --metrics-port N, too." in refused.output
    monkeypatch.setenv("DILOCO_METRICS_HOST", "0.0.0.0")
    assert "--metrics-host" not in CliRunner().invoke(main, [command, "tiny"]).output


def test_two_options_of_a_volunteer_with_one_port_are_both_named() -> None:
    typed = ["join", "tiny-" + "a" * 32, "--data-port", "8080", "--dashboard"]
    refused = CliRunner().invoke(main, [*typed, "127.0.0.1:8080"])
    assert refused.exit_code == 2
    assert "--data-port and --dashboard both have port 8080: choose another for one of them." in refused.output
    assert "is not HOST:PORT" in CliRunner().invoke(main, [*typed, "8080"]).output


def test_a_volunteer_whose_key_is_in_use_does_not_print_where_its_metrics_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it printed the address, and then that the key is in use."""
    monkeypatch.setattr(PLACE, "run", None)  # the command sets it; log lines of later tests must not name the run
    address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    key, invite = tmp_path / "key.pem", str(Invite("tiny-" + "a" * 32, (address,)))
    with hold_identity(key):
        command = ["join", invite, "--plain", "--metrics-port", "0", "--identity", str(key), "--state", str(tmp_path)]
        done = CliRunner().invoke(main, command)
    assert done.exit_code == 15, done.output
    assert "metrics are at" not in done.output


def test_a_volunteer_leaves_at_the_next_such_moment() -> None:
    watch = _owners_watch(JoinSettings(run="tiny-x", until="07:30"), Lines())
    assert watch.until is not None
    assert watch.until > datetime.now()
    assert _owners_watch(JoinSettings(run="tiny-x"), Lines()).until is None


@pytest.mark.parametrize(("is_in_run", "said"), [(False, "stopped before joining the run"), (True, "stopped at once")])
def test_who_interrupts_a_start_hears_that_it_has_ended(
    is_in_run: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: after Ctrl-C during the start the terminal showed nothing at all."""

    async def take_part(session: Session, view: Lines, when_ready: Callable[[Any, Any], None]) -> None:
        if is_in_run:
            when_ready(SimpleNamespace(leave=lambda: None, outer_step=0), None)
        raise asyncio.CancelledError

    monkeypatch.setattr(Session, "take_part", take_part)
    monkeypatch.setattr("opendiloco.dashboard.watching.volunteer_source", lambda volunteer, transport: None)
    settings, view = JoinSettings(run="tiny-x"), Lines()
    traffic: Any = None
    watch = _owners_watch(settings, view)
    joining = _Joining(settings, cast(Any, None), Identity.generate(), watch, traffic, view, None)

    async def interrupt() -> None:
        with pytest.raises(asyncio.CancelledError):
            await joining._take_part(cast(Any, SimpleNamespace(polite=None)), [], "stopped before joining the run")

    asyncio.run(interrupt())
    assert capsys.readouterr().out.strip() == said


@pytest.mark.parametrize("has_trained", [True, False])
@pytest.mark.parametrize("ends_by", ["finish", "Ctrl-C", "Ctrl-C while it rejoins"])
def test_who_ends_a_volunteer_that_is_away_sees_its_farewell(
    has_trained: bool, ends_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it ended without a line, as its processes were gone."""
    settings, view = JoinSettings(run="tiny-x", state=tmp_path), Lines()
    watch = _owners_watch(settings, view)
    traffic: Any = SimpleNamespace(lines=list)
    joining = _Joining(settings, cast(Any, Invite("tiny-x", ())), Identity.generate(), watch, traffic, view, None)
    interrupts: Any = SimpleNamespace(polite=None)
    looks: list[Facts] = []
    sessions: list[Session] = []

    def look() -> Facts:
        looks.append(Facts(datetime.now()))
        return looks[-1]

    async def take_part(session: Session, view: Lines, when_ready: Callable[[Any, Any], None]) -> str:
        sessions.append(session)
        if len(sessions) > has_trained:
            await asyncio.Event().wait()
        watch.answer(OwnerRequest(do="pause"))
        watch._leave("the pause is long", comes_back=True)
        return "left the run"

    async def away() -> None:
        living = asyncio.create_task(joining.live(interrupts))
        while watch.comes_back or not watch.reasons or not looks:
            await asyncio.sleep(0)
        if ends_by == "finish":
            watch.answer(OwnerRequest(do="finish"))
        if ends_by == "Ctrl-C while it rejoins":
            watch.answer(OwnerRequest(do="resume"))
            while len(sessions) <= has_trained:
                await asyncio.sleep(0)
        if ends_by != "finish":
            living.cancel()
        await asyncio.gather(living, return_exceptions=True)

    monkeypatch.setattr(Session, "take_part", take_part)
    monkeypatch.setattr("opendiloco.owner.watch.LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_look", look)
    if not has_trained:
        watch.answer(OwnerRequest(do="pause"))
    asyncio.run(away())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("left the run" if has_trained else "stopped before joining the run")
