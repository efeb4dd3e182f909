"""What `run amend` signs, and what heartbeats say of amendments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from math import nan
from typing import Any

import pytest
from click.testing import CliRunner

from opendiloco.cli import main
from opendiloco.cli.run import _check_key, _next_amendment, _rise, _send_amendment
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import AmendmentError
from opendiloco.model.build import with_sizes_named
from opendiloco.run import Run
from opendiloco.view.amended import Amended
from opendiloco.view.run_view import RunView
from peers.errors import ManifestError, SwarmUnreachableError
from peers.network.channel import PeerUnreachableError
from peers.network.known_runs import KnownRuns
from peers.presence.heartbeat import Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.manifest import AMENDMENTS_LIMIT, Amendment, Invite, SignedManifest
from tests.opendiloco.training.recorded_run import amendment as sign
from tests.opendiloco.view.test_agreement import beat

ORGANISER, STRANGER = Identity.generate(), Identity.generate()


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, ORGANISER)


def amendment(run: Run, number: int, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return sign(run, number, by, outer_learning_rate=learning_rate, outer_momentum=0.5)


def next_amendment(run: Run, beats: Sequence[Heartbeat], **changes: object) -> Amendment:
    return _next_amendment(RunView(run, beats), ORGANISER, changes)


def saying(peer: str, tokens: int = 0, state: PeerState = PeerState.TRAINING, **said: Any) -> Heartbeat:
    return beat(peer, 5, 5, state).model_copy(update={"lineage_tokens": tokens} | said)


# What is seen --------------------------------------------------------------------------------------------------
def test_without_amendments_the_manifests_values_are_in_force(run: Run) -> None:
    for beats in ([], [saying("a")]):
        seen = Amended.seen_in(run, beats)
        assert (seen, seen.lines()) == (Amended(None, None), [])
        plain = seen.plain(run.config)
        assert (plain["outer_learning_rate"], plain["outer_momentum"]) == (0.7, 0.6)
        assert plain["amendment"] is plain["proposed"] is None


def test_what_is_in_force_is_what_the_peer_that_is_furthest_on_says(run: Run) -> None:
    second, third = amendment(run, 2), amendment(run, 3, 0.1)
    seen = Amended.seen_in(run, [saying("a", 10), saying("b", 20, amendment=second, proposed=third)])
    assert seen == Amended(second, third)
    assert seen.lines() == [
        "in force: amendment 2 (outer learning rate 0.4, outer momentum 0.5)",
        "waits for an entry: amendment 3 (outer learning rate 0.1, outer momentum 0.5)",
    ]
    plain = seen.plain(run.config)
    assert (plain["outer_learning_rate"], plain["outer_momentum"]) == (0.4, 0.5)
    assert plain["proposed"] == {"number": 3, "outer_learning_rate": 0.1, "outer_momentum": 0.5}
    assert Amended.seen_in(run, [saying("a", 30), saying("b", 20, amendment=second)]) == Amended(None, second)


def test_what_the_organiser_has_not_signed_is_passed_over(run: Run) -> None:
    forged = amendment(run, 9, by=STRANGER)
    assert Amended.seen_in(run, [saying("a", amendment=forged, proposed=forged)]) == Amended(None, None)


def test_what_this_version_does_not_understand_is_named_as_such(run: Run) -> None:
    later = Amendment.sign(run.run_id, 4, b'{"loss_scale":2}', ORGANISER)
    seen = Amended.seen_in(run, [saying("a", amendment=later)])
    assert seen.lines() == ["in force: amendment 4 (this version does not understand it: upgrade diloco-peer)"]
    plain = seen.plain(run.config)
    assert plain["amendment"] == {"number": 4, "problem": "this version does not understand it: upgrade diloco-peer"}


# What is signed ------------------------------------------------------------------------------------------------
def test_what_is_not_given_stays_as_it_is(run: Run) -> None:
    first = next_amendment(run, [], outer_learning_rate=0.4)
    assert (first.number, first.content) == (1, b'{"outer_learning_rate":0.4}')
    assert first.is_signed(run.run_id, ORGANISER.peer_id)
    second = next_amendment(run, [saying("a", proposed=first)], outer_momentum=0.8)
    assert (second.number, second.content) == (2, b'{"outer_learning_rate":0.4,"outer_momentum":0.8}')
    third = next_amendment(run, [saying("a", amendment=second), saying("b", amendment=first)], outer_learning_rate=0.2)
    assert (third.number, third.content) == (3, b'{"outer_learning_rate":0.2,"outer_momentum":0.8}')


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("outer_learning_rate", 200.0, r"the amendment: outer_learning_rate = 200.0: too large. Use 100.0 or less"),
        ("outer_learning_rate", 0.0, r"outer_learning_rate = 0.0: too small"),
        ("outer_learning_rate", nan, r"outer_learning_rate = nan"),
        ("outer_momentum", 1.0, r"outer_momentum = 1.0: too large"),
        ("outer_momentum", 1e-20, r"outer_momentum: a momentum of 1e-20 is too small; use 0, or 0.001 or more"),
    ],
)
def test_values_that_run_toml_could_not_have_are_refused_in_its_words(
    name: str, value: float, message: str, run: Run
) -> None:
    with pytest.raises(ManifestError, match=message):
        next_amendment(run, [], **{name: value})


@pytest.mark.parametrize(
    ("changes", "content"),
    [
        ({"outer_steps": 7}, b'{"outer_steps":7}'),
        (
            {"decay": {"after": None, "outer_steps": 3}},
            b'{"decay":{"after":6,"outer_steps":3},"outer_steps":9}',
        ),
        (
            {"decay": {"after": 8, "outer_steps": 3}, "outer_steps": 10},
            b'{"decay":{"after":8,"outer_steps":3},"outer_steps":10}',
        ),
    ],
)
def test_a_decay_begins_at_once_and_ends_the_run_unless_more_is_said(
    changes: dict[str, object], content: bytes, run: Run
) -> None:
    assert next_amendment(run, [saying("a"), saying("b")], **changes).content == content


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer_steps": 5}, r"outer_steps = 5: the run has taken 5 outer steps. Use 6 or more"),
        ({"decay": {"after": 5, "outer_steps": 3}}, r"decay.after = 5: the run has taken 5 outer steps. Use 6 or more"),
        ({"decay": {"after": 6, "outer_steps": 0}}, r"decay.outer_steps = 0: too small. Use 1 or more"),
        (
            {"outer_steps": 9},
            r"schedule ends after 26 inner steps, and the run after 36; the learning rate is then 0",
        ),
        ({"decay": {"after": 6, "outer_steps": 3}, "outer_steps": 20}, r"schedule ends after 36 inner steps, .* 80"),
    ],
)
def test_what_has_passed_or_would_train_with_a_rate_of_0_is_refused(
    changes: dict[str, object], message: str, run: Run
) -> None:
    with pytest.raises(ManifestError, match=message):
        next_amendment(run, [saying("a"), saying("b")], **changes)


@pytest.mark.parametrize(
    ("changes", "rises"),
    [
        ({"outer_learning_rate": 0.4}, False),
        ({"decay": {"after": None, "outer_steps": 3}}, True),
        ({"decay": {"after": None, "outer_steps": 3}, "inner_learning_rate_factor": 0.01}, False),
    ],
)
def test_a_decay_that_begins_anew_and_so_raises_the_learning_rate_is_warned_of(
    changes: dict[str, object], rises: bool, run: Run
) -> None:
    beats = [saying("a"), saying("b")]
    warning = _rise(RunView(run, beats), next_amendment(run, beats, **changes))
    assert ("the inner learning rate rises from" in warning) == rises


def test_a_run_that_streams_ends_after_the_next_cycle_at_the_earliest(small_content: dict[str, Any]) -> None:
    """Its last cycle ends with a final synchronisation, which the cycle under way was not begun with."""
    streaming = {"layers_per_fragment": 1, "overlap": 1}
    config = with_sizes_named(RunConfig.from_manifest_content(small_content | {"streaming": streaming}))
    run = Run.sign(config, ORGANISER)
    with pytest.raises(ManifestError, match=r"outer_steps = 6: the run has taken 5 outer steps. Use 7 or more"):
        next_amendment(run, [saying("a"), saying("b")], outer_steps=6)


@pytest.fixture
def mixed(small_content: dict[str, Any]) -> Run:
    sources = [{"source": name, "weight": weight} for name, weight in (("stdlib", 3), ("code", 1), ("code", 0))]
    return Run.sign(RunConfig.from_manifest_content(small_content | {"data": {"sources": sources}}), ORGANISER)


def test_sources_that_are_not_named_keep_their_weight(mixed: Run) -> None:
    first = next_amendment(mixed, [], weights=[("stdlib", 0.0), ("#3", 2.5)])
    assert first.content == b'{"weights":[0.0,1.0,2.5]}'
    second = next_amendment(mixed, [saying("a", amendment=first)], weights=[("#2", 0.0)])
    assert second.content == b'{"weights":[0.0,0.0,2.5]}'


def test_a_source_has_the_name_of_run_toml(small_content: dict[str, Any]) -> None:
    """Regression: `run create` writes "./" before a folder such as "texts", which --mixture then had to repeat."""
    sources = [{"source": name, "weight": 1} for name in ("./texts", "stdlib")]
    run = Run.sign(RunConfig.from_manifest_content(small_content | {"data": {"sources": sources}}), ORGANISER)
    for name in ("texts", "./texts"):
        assert next_amendment(run, [], weights=[(name, 2.0)]).content == b'{"weights":[2.0,1.0]}'


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([("cod", 1.0)], r"no sources of the run have the name 'cod'. Name one of: #1 stdlib, #2 code, #3 code"),
        ([("code", 1.0)], r"2 sources of the run have the name 'code'"),
        ([("#4", 1.0)], r"no sources"),
        ([("stdlib", -1.0)], r"weights.0 = -1.0: too small"),
        ([("stdlib", nan)], r"weights.0 = nan: not finite"),
        ([("stdlib", 0.0), ("#2", 0.0)], r"weights: all weights are 0"),
    ],
)
def test_a_mixture_that_the_run_cannot_have_is_refused(
    weights: list[tuple[str, float]], message: str, mixed: Run
) -> None:
    with pytest.raises(ManifestError, match=message):
        next_amendment(mixed, [], weights=weights)


def test_a_run_is_amended_so_often_and_no_more(run: Run) -> None:
    last = amendment(run, AMENDMENTS_LIMIT)
    with pytest.raises(ManifestError, match="amended 64 times"):
        next_amendment(run, [saying("a", amendment=last)], outer_momentum=0.1)


def test_a_run_that_has_taken_its_last_outer_step_is_not_amended(run: Run) -> None:
    beats = [beat("a", 7), beat("b", 7)]
    for changes in ({"outer_steps": 20}, {"outer_momentum": 0.1}):
        with pytest.raises(ManifestError, match="has taken its last outer step, so no amendment can enter its log"):
            next_amendment(run, beats, **changes)
    longer = sign(run, 1, ORGANISER, decay={"after": 8, "outer_steps": 2}, outer_steps=10)
    going_on = [one.model_copy(update={"amendment": longer}) for one in beats]
    assert next_amendment(run, going_on, outer_momentum=0.1).number == 2


def test_nothing_is_amended_on_top_of_what_is_not_understood(run: Run) -> None:
    later = Amendment.sign(run.run_id, 4, b'{"loss_scale":2}', ORGANISER)
    with pytest.raises(AmendmentError, match="Upgrade diloco-peer"):
        next_amendment(run, [saying("a", amendment=later)], outer_momentum=0.8)


def test_only_the_organiser_signs(run: Run) -> None:
    _check_key(run, ORGANISER)
    with pytest.raises(ManifestError, match="Name the organiser's key file with --identity"):
        _check_key(run, STRANGER)


# To whom it is given -------------------------------------------------------------------------------------------
class Network:
    """Peers that take amendments, and some that are gone."""

    peer_id = ""  # of a connection
    is_reachable = True  # for the organiser's key

    def __init__(self, run: Run, beats: list[Heartbeat], gone: str = "", not_in_dht: str = "") -> None:
        self.beats, self.gone, self.nodes = beats, gone, {one.peer: KnownRuns() for one in beats}
        self.not_in_dht = not_in_dht
        for node in self.nodes.values():
            node.learn(run.manifest)

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        hidden = self.peer_id if self.peer_id == ORGANISER.peer_id else self.not_in_dht
        return [one for one in self.beats if one.peer != hidden]

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        return peer_id not in (self.gone, self.peer_id)

    def learn(self, manifest: SignedManifest) -> None:
        pass

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if peer_id == "b":
            raise PeerUnreachableError(peer_id, "no answer in time")
        return await self.nodes[peer_id].answer_amendment(self.peer_id, payload)


def amended(network: Network, run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Amendment, int]:
    @asynccontextmanager
    async def connected(key: Identity, *_: Any, **__: Any) -> AsyncIterator[Network]:
        if key is ORGANISER and not network.is_reachable:
            raise SwarmUnreachableError("it is the only node", "")
        connection = copy(network)
        connection.peer_id = key.peer_id
        yield connection

    async def found(*_: Any) -> Run:
        return run

    monkeypatch.setattr("opendiloco.volunteer.volunteer.connected", connected)
    monkeypatch.setattr("opendiloco.run.find_run", found)
    return asyncio.run(_send_amendment(Invite(run.run_id, ()), ORGANISER, {"outer_learning_rate": 0.4}))


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


def test_a_volunteer_with_the_organisers_key_takes_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the organiser's own volunteer, alone in its run, was not reached, as no node talks to itself."""
    _, told = amended(Network(run, [saying(ORGANISER.peer_id)]), run, monkeypatch)
    assert told == 1


def test_a_run_by_invitation_is_amended_like_another(
    small_content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers name others only to the organiser. Regression: the organiser's own volunteer was not reached."""
    run = Run.sign(RunConfig.model_validate(small_content | {"admission": {"mode": "invite"}}), ORGANISER)
    beats = [saying("a"), saying("c"), saying(ORGANISER.peer_id)]
    assert amended(Network(run, beats, not_in_dht="a"), run, monkeypatch)[1] == 3
    network = Network(run, beats, not_in_dht="a")
    network.is_reachable = False
    assert amended(network, run, monkeypatch)[1] == 2


def test_it_is_an_error_where_nobody_takes_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SwarmUnreachableError, match="Amend again while a volunteer trains"):
        amended(Network(run, [saying("b"), saying("d", state=PeerState.ARCHIVING)]), run, monkeypatch)


def test_the_command_wants_to_know_what_to_change(run: Run) -> None:
    result = CliRunner().invoke(main, ["run", "amend", "--run", run.run_id])
    assert result.exit_code == 2
    assert "no change is given" in result.output
