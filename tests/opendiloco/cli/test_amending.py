"""What `run amend` signs, and what heartbeats say of amendments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf, nan
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from opendiloco.cli import main
from opendiloco.cli.run import _check_key, _give_amendment, _next_amendment
from opendiloco.config.optimizers import OuterOptimizerSection
from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.view.run_view import Amended
from peers.errors import ManifestError, SwarmUnreachableError
from peers.network.channel import PeerUnreachableError
from peers.network.known_runs import KnownRuns
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.manifest import Amendment, Invite
from tests.opendiloco.view.test_agreement import beat

ORGANISER, STRANGER = Identity.generate(), Identity.generate()


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, ORGANISER)


def amendment(run: Run, number: int, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return Amendment.sign(run.run_id, number, learning_rate, 0.5, by)


def saying(peer: str, tokens: int = 0, state: PeerState = PeerState.TRAINING, **said: Any) -> Heartbeat:
    return beat(peer, 5, 5, state).model_copy(update={"lineage_tokens": tokens} | said)


# What is seen --------------------------------------------------------------------------------------------------
def test_without_amendments_the_manifests_values_are_in_force(run: Run) -> None:
    for beats in ([], [saying("a")]):
        seen = Amended.seen_in(run, beats)
        assert (seen, seen.lines()) == (Amended(None, None), [])
        assert seen.plain(run) == {"learning_rate": 0.7, "momentum": 0.6, "amendment": None, "proposed": None}


def test_what_is_in_force_is_what_the_peer_that_is_furthest_on_says(run: Run) -> None:
    second, third = amendment(run, 2), amendment(run, 3, 0.1)
    seen = Amended.seen_in(run, [saying("a", 10), saying("b", 20, amendment=second, proposed=third)])
    assert seen == Amended(second, third)
    assert seen.lines() == [
        "in force: amendment 2 (outer learning rate 0.4, momentum 0.5)",
        "waits for an entry: amendment 3 (outer learning rate 0.1, momentum 0.5)",
    ]
    plain = seen.plain(run)
    assert (plain["learning_rate"], plain["momentum"]) == (0.4, 0.5)
    assert plain["proposed"] == {"number": 3, "learning_rate": 0.1, "momentum": 0.5}
    assert Amended.seen_in(run, [saying("a", 30), saying("b", 20, amendment=second)]) == Amended(None, second)


def test_what_the_organiser_has_not_signed_is_passed_over(run: Run) -> None:
    forged = amendment(run, 9, by=STRANGER)
    assert Amended.seen_in(run, [saying("a", amendment=forged, proposed=forged)]) == Amended(None, None)


# What is signed ------------------------------------------------------------------------------------------------
def test_what_is_not_given_stays_as_it_is(run: Run) -> None:
    first = _next_amendment(run, ORGANISER, [], 0.4, None)
    assert (first.number, first.learning_rate, first.momentum) == (1, 0.4, 0.6)
    assert first.is_signed(run.run_id, ORGANISER.peer_id)
    second = _next_amendment(run, ORGANISER, [saying("a", proposed=first)], None, 0.8)
    assert (second.number, second.learning_rate, second.momentum) == (2, 0.4, 0.8)
    third = _next_amendment(run, ORGANISER, [saying("a", amendment=second), saying("b", amendment=first)], 0.2, None)
    assert (third.number, third.learning_rate, third.momentum) == (3, 0.2, 0.8)


@pytest.mark.parametrize(
    ("learning_rate", "momentum", "message"),
    [
        (200.0, None, r"outer_optimizer.learning_rate = 200.0: too large. Use 100.0 or less"),
        (0.0, None, r"outer_optimizer.learning_rate = 0.0: too small"),
        (nan, None, r"outer_optimizer.learning_rate = nan"),
        (None, 1.0, r"outer_optimizer.momentum = 1.0: too large"),
    ],
)
def test_values_that_run_toml_could_not_have_are_refused_in_its_words(
    learning_rate: float | None, momentum: float | None, message: str, run: Run
) -> None:
    with pytest.raises(ManifestError, match=message):
        _next_amendment(run, ORGANISER, [], learning_rate, momentum)


@pytest.mark.parametrize(
    ("learning_rate", "momentum"),
    [(1e-30, 0.0), (100.0, 0.999), (0.0, 0.9), (101.0, 0.9), (0.7, 1.0), (0.7, -0.1), (nan, 0.5), (inf, 0.5)],
)
def test_peers_bounds_are_those_of_run_toml(learning_rate: float, momentum: float, run: Run) -> None:
    def is_amendment() -> bool:
        try:
            Amendment.sign(run.run_id, 1, learning_rate, momentum, ORGANISER)
        except ValidationError:
            return False
        return True

    def is_section() -> bool:
        try:
            OuterOptimizerSection(learning_rate=learning_rate, momentum=momentum)
        except ValidationError:
            return False
        return True

    assert is_amendment() == is_section()


def test_only_the_organiser_signs(run: Run) -> None:
    _check_key(run, ORGANISER)
    with pytest.raises(ManifestError, match="Name the organiser's key file with --identity"):
        _check_key(run, STRANGER)


# To whom it is given -------------------------------------------------------------------------------------------
class Network:
    """Peers that take amendments, and some that are gone."""

    peer_id = ORGANISER.peer_id

    def __init__(self, run: Run, beats: list[Heartbeat], gone: str = "") -> None:
        self.beats, self.gone, self.nodes = beats, gone, {one.peer: KnownRuns() for one in beats}
        for node in self.nodes.values():
            node.learn(run.manifest)

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        return self.beats

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        return peer_id not in self.gone

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if peer_id == "b":
            raise PeerUnreachableError(peer_id, "no answer in time")
        return await self.nodes[peer_id].answer_amendment(self.peer_id, payload)


def amended(network: Network, run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Amendment, int]:
    @asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncIterator[Network]:
        yield network

    async def found(*_: Any) -> Run:
        return run

    monkeypatch.setattr("opendiloco.volunteer.volunteer.connected", connected)
    monkeypatch.setattr("opendiloco.run.find_run", found)
    return asyncio.run(_give_amendment(Invite(run.run_id, ()), ORGANISER, 0.4, None))


def test_it_is_given_to_all_peers_that_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = [
        saying("a"),
        saying("b"),
        saying("c", state=PeerState.LEAVING),
        saying("d", state=PeerState.ARCHIVING),
        saying("e"),
        saying("f"),
    ]
    network = Network(run, beats, gone="e")
    signed, told = amended(network, run, monkeypatch)
    assert told == 2
    assert {name for name, node in network.nodes.items() if node.amendment_of(run.run_id) == signed} == {"a", "f"}


def test_it_is_an_error_where_nobody_takes_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SwarmUnreachableError, match="Amend again while a volunteer trains"):
        amended(Network(run, [saying("b"), saying("d", state=PeerState.ARCHIVING)]), run, monkeypatch)


def test_the_command_wants_to_know_what_to_change(run: Run) -> None:
    result = CliRunner().invoke(main, ["run", "amend", "--run", run.run_id])
    assert result.exit_code == 2
    assert "--outer-lr, --outer-momentum or both" in result.output
