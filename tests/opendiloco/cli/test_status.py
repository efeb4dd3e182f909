"""`diloco-peer status` looks until it can say whether the peers agree."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from opendiloco.cli import status as module
from opendiloco.cli.status import COMPARE_SECONDS
from opendiloco.config.run_config import RunConfig
from opendiloco.owner.controls import VolunteerStatus
from opendiloco.run import Run
from opendiloco.view.run_view import RunView
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.manifest import Invite
from peers.values.signed_heads import SignedHeads
from tests.opendiloco.view.test_agreement import beat
from tests.peers.network.test_throttle import simulate

Look = Callable[[float], list[Heartbeat]]


class Network:
    """Its peers say what `look` returns at each time."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.looks = 0

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        self.looks += 1
        return self.look(asyncio.get_running_loop().time())

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        return SignedHeads(run_id)


def apart(seconds: float) -> list[Heartbeat]:
    """Two that never are at one outer step: each look finds them at two new ones."""
    index = 2 * int(seconds)
    return [beat("a", index, index), beat("b", index + 1, index + 1)]


def one_behind(seconds: float) -> list[Heartbeat]:
    """The second is seen where the first was a look before."""
    index = int(seconds)
    return [beat("a", index + 1, index + 1), beat("b", index, index)]


def lone(state: PeerState) -> Look:
    return lambda seconds: [beat("a", 5, 5), beat("b", 0, 0, state)]


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, Identity.generate())


@pytest.mark.parametrize(
    ("look", "verdict", "looks"),
    [
        (lambda seconds: [beat("a", 5, 5), beat("b", 5, 5)], True, 1),
        (lambda seconds: [beat("a", 5, 5), beat("b", 5, 6)], False, 1),
        (one_behind, True, 2),
        (apart, None, COMPARE_SECONDS + 1),
        (lone(PeerState.LEAVING), None, 1),
        (lone(PeerState.JOINING), None, 1),
        (lone(PeerState.ARCHIVING), None, 1),
    ],
)
def test_it_looks_again_while_there_are_two_that_may_be_compared(
    run: Run, look: Look, verdict: bool | None, looks: int
) -> None:
    network = Network(look)
    view = simulate(module._compare(network, run))  # type: ignore[arg-type]
    assert (view.agreement.verdict, network.looks) == (verdict, looks)


@pytest.mark.parametrize(("look", "agree"), [(one_behind, True), (apart, None)])
def test_programs_hear_that_nothing_could_be_compared(
    run: Run, look: Look, agree: bool | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: they heard that all agree."""

    @asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncIterator[Network]:
        yield Network(look)

    async def found(*_: Any) -> Run:
        return run

    monkeypatch.setattr("opendiloco.volunteer.volunteer.connected", connected)
    monkeypatch.setattr("opendiloco.run.find_run", found)
    monkeypatch.setattr("opendiloco.volunteer.admission.ask_for_signed_heads", found)
    monkeypatch.setattr(module, "_volunteers_here", lambda run_id: {})
    simulate(module._show_status(Invite(run.run_id, ()), Identity.generate(), as_json=True, watch=False))
    shown = json.loads(capsys.readouterr().out)
    assert shown["agree"] is agree
    assert [peer["peer"] for peer in shown["peers"]] == ["a", "b"]
    simulate(module._show_status(Invite(run.run_id, ()), Identity.generate(), as_json=False, watch=False))
    assert ("add --watch to look longer" in capsys.readouterr().out) == (agree is None)


def test_a_peer_alone_is_not_compared(run: Run) -> None:
    """Regression: `status` found nothing to compare beside an archive with the same log at the same outer step."""
    seen = [beat("a", 5, 5), beat("b", 5, 5).model_copy(update={"state": PeerState.ARCHIVING})]
    lines = [str(part) for part in module._picture(RunView(run, seen), SignedHeads(run.run_id), {}).renderables]
    assert lines[-1] == "the logs of 2 peers agree; no two have reported a state digest at the same outer step yet"


def test_a_volunteer_of_this_machine_that_is_paused_is_shown_as_such(run: Run) -> None:
    console = Console(width=200)
    here = {"a": VolunteerStatus(says="", phase="", reasons=("on battery",)), "b": VolunteerStatus(says="", phase="")}
    with console.capture() as capture:
        view = RunView(run, [beat("a", 5, 5), beat("b", 5, 5)])
        console.print(module._picture(view, SignedHeads(run.run_id), here))
    states = [line.split()[1:4] for line in capture.get().splitlines()[2:4]]
    assert states == [["paused", "3/4", "0"], ["training", "3/4", "1,234"]]


@pytest.mark.parametrize("said", ["[/red] is no tag", "[link=https://evil.example]all is well[/link]"])
def test_a_peers_words_are_shown_as_text_only(run: Run, said: str) -> None:
    """Regression: one bracket ended `status` for everybody, and a peer could put links on their terminals."""
    console = Console(width=200, force_terminal=True)
    with console.capture() as capture:
        troubled = beat("a", 5, 5).model_copy(update={"trouble": said})
        console.print(module._picture(RunView(run, [troubled]), SignedHeads(run.run_id), {}))
    assert said in capture.get()
