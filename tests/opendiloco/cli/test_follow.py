"""`diloco-peer follow`: what it prints, evaluates, exports and ends with, on a swarm without a network or a worker."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from opendiloco.cli import main
from opendiloco.config.run_config import EvaluationSection, RunConfig
from opendiloco.data.own_files import local_sources
from opendiloco.evaluation_turns import HeldOut
from opendiloco.model.export import RunFacts
from opendiloco.run import Run
from opendiloco.shared_memory import Vector
from opendiloco.training.outer import LocalState
from opendiloco.volunteer import local_workload, volunteer
from opendiloco.workers.options import WorkerOptions
from peers.errors import DilocoPeerError
from peers.log.folder import RunLog
from peers.network.channel import PeerUnreachableError
from peers.network.known_runs import KnownRuns
from peers.presence.heartbeat import Heartbeat
from peers.transfer.buffers import PayloadBuffers
from peers.transfer.lineage_fetch import HEADERS, HeadersRequest, serve_headers
from peers.transfer.payloads import serve_payloads
from peers.transfer.snapshots import Snapshot, serve_snapshots
from peers.values.chunks import chunk_digests
from peers.values.identity import Identity
from peers.values.manifest import Invite, SignedManifest
from peers.values.wire import digest_of, unpack
from tests.opendiloco.training.recorded_run import RecordedRun, amendment, record
from tests.peers.fakes import FakeTransport
from tests.peers.heartbeats import beat

VALUES = 2500
ENTRIES = 4
ORGANISER = Identity.generate()
FROZEN = 1  # the outer step of the only snapshot


class Donor:
    """A peer with a recorded run, which serves the real protocol."""

    def __init__(self, recorded: RecordedRun) -> None:
        self.recorded = recorded
        self.transport = FakeTransport()
        saved = recorded.states[FROZEN]
        digests = chunk_digests([saved.data])
        self.snapshot = Snapshot(saved.last, saved.state_digest, digests, saved.data)
        self.buffers = PayloadBuffers(new_state(recorded.run).fragments[0], 1 << 30)
        for payload in recorded.payloads:
            self.buffers.kept.keep(payload)
        self.log = RunLog(recorded.empty_log)
        recorded.fill(self.log)

    async def serve(self) -> FakeTransport:
        run_id = self.recorded.run.run_id
        await serve_snapshots(self.transport, {run_id: self})
        await serve_headers(self.transport, {run_id: self.log.stretch})
        await serve_payloads(self.transport, {run_id: [self.buffers]})
        return self.transport

    def is_member(self, peer: str) -> bool:
        return False

    async def newest(self, least: int) -> Snapshot:
        return self.snapshot

    def held(self, head: bytes) -> Snapshot | None:
        return self.snapshot


class Network(FakeTransport):
    """The swarm as the command finds it: peers, each with the digest that it says its last state has."""

    def __init__(self, recorded: RecordedRun, said: dict[str, bytes]) -> None:
        super().__init__("follower")
        self.recorded = recorded
        self.said = said
        self.reader = ""
        self.beats: list[Heartbeat] = []
        self.published: list[bytes] = []
        self.runs = KnownRuns()
        self.daemon = SimpleNamespace(failure=self.failure)

    def learn(self, manifest: SignedManifest) -> None:
        self.runs.learn(manifest)

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        raise PeerUnreachableError(peer_id, "no answer in time")

    async def find_manifest(self, run_id: str) -> SignedManifest:
        return self.recorded.run.manifest

    async def connect(self, peer_id: str, addresses: tuple[str, ...]) -> bool:
        return True

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        return self.beats

    async def failure(self) -> DilocoPeerError:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def open(self) -> None:
        self.beats.clear()
        end = self.recorded.empty_log.at(self.recorded.headers[-1])
        for name, digest in self.said.items():
            self.donors[name] = await Donor(self.recorded).serve()
            self.beats.append(beat(name, end, run=self.recorded.run.run_id, state_digest=digest))


class Model(LocalState):
    """A workload whose worker is made up."""

    bytes_per_token = 2 / math.log(2)

    def __init__(self, theta: Vector, config: RunConfig, reads: bool) -> None:
        super().__init__(theta, config)
        self.reads = reads
        self.trainer = self

    async def held_out(self, section: EvaluationSection) -> HeldOut:
        return HeldOut(2.5, is_runs_text=True)

    async def export(self, folder: Path, facts: RunFacts, dtype: str) -> None:
        data = "--data TEXTS " if self.reads else ""
        said = f"diloco-peer follow --run {facts.run_id} --initial-peer ADDRESS {data}--export "
        assert facts.command.startswith(said)
        assert facts.contributors == 2
        if not self.reads:
            assert (facts.held_out_loss, facts.curve) == (None, ())
            folder.mkdir()
            return
        assert [point.outer_step for point in facts.curve] == list(range(2, facts.outer_steps + 1, 2)), "all of them"
        folder.mkdir()
        (folder / "README.md").write_text(str(facts.outer_steps))


def new_state(run: Run) -> LocalState:
    return LocalState(np.zeros(VALUES, np.float32), run.config)


@pytest.fixture(scope="module")
def recorded(small_config: RunConfig) -> RecordedRun:
    return record(Run.sign(small_config, Identity.generate()), np.ones(VALUES, np.float32), ENTRIES)


@pytest.fixture
def network(recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> Network:
    """Two peers that agree. Starting a worker without need fails."""
    network = Network(recorded, dict.fromkeys("ab", recorded.states[-1].state_digest))

    @asynccontextmanager
    async def connected(identity: Identity, addresses: Sequence[str]) -> AsyncIterator[Network]:
        network.reader = identity.peer_id
        await network.open()
        yield network

    monkeypatch.setattr(volunteer, "connected", connected)
    monkeypatch.setattr(local_workload, "working", None)
    return network


@pytest.fixture
def model(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def working(run: Run, options: WorkerOptions) -> AsyncIterator[Model]:
        yield Model(np.zeros(VALUES, np.float32), run.config, options.reads)

    monkeypatch.setattr(local_workload, "working", working)


def follow(recorded: RecordedRun, *arguments: object) -> Result:
    [text] = local_sources(recorded.run.config.data)
    invite = Invite(recorded.run.run_id, (f"/ip4/192.0.2.2/tcp/1/p2p/{Identity.generate().peer_id}",))
    return CliRunner().invoke(main, ["follow", "--run", str(invite), "--data", text, *map(str, arguments)])


def news(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_line_per_state(recorded: RecordedRun, network: Network) -> None:
    result = follow(recorded, "--until", ENTRIES)
    assert result.exit_code == 0, result.output
    states = [saved.state_digest.hex()[:8] for saved in recorded.states]
    assert result.stdout.splitlines() == [
        f"outer step 1 (snapshot): peers 2, tokens 256, in all 256, state {states[1]}, not confirmed by a peer yet",
        f"outer step 2: peers 2, tokens 256, in all 512, state {states[2]}, not confirmed by a peer yet",
        f"outer step 3: peers 2, tokens 256, in all 768, state {states[3]}, not confirmed by a peer yet",
        f"outer step 4: peers 2, tokens 256, in all 1,024, state {states[4]}, 2 peers agree",
    ]


@pytest.fixture
def by_invitation(
    small_content: dict[str, Any], network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The folder of this machine's key, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = RunConfig.from_manifest_content(small_content | {"admission": {"mode": "invite"}})
    network.recorded = record(Run.sign(config, ORGANISER), np.ones(VALUES, np.float32), ENTRIES)
    network.said = dict.fromkeys("ab", network.recorded.states[-1].state_digest)
    return tmp_path / "diloco-peer"


def test_a_run_by_invitation_sees_this_machines_key(by_invitation: Path, network: Network) -> None:
    """Regression: the organiser's own commands came with a random key."""
    by_invitation.mkdir(parents=True)
    ORGANISER.save(by_invitation / "identity.pem")
    result = follow(network.recorded, "--until", ENTRIES)
    assert result.exit_code == 0, result.output
    assert network.reader == ORGANISER.peer_id


def test_a_run_by_invitation_refuses_others_at_once(by_invitation: Path, network: Network) -> None:
    """Regression: `follow` waited for ever."""
    result = follow(network.recorded, "--until", ENTRIES)
    assert result.exit_code == 13
    assert f"this machine ({network.reader}) has no ticket" in result.stderr
    assert f"--for {network.reader}" in result.stderr
    assert "--identity" in result.stderr
    assert "--ticket" in result.stderr


def test_an_object_per_state(recorded: RecordedRun, network: Network) -> None:
    [first, second] = news(follow(recorded, "--until", 2, "--json"))
    assert (first["event"], second["event"]) == ("snapshot", "entry")
    assert second == {
        "event": "entry",
        "outer_step": 2,
        "peers": 2,
        "tokens": 256,
        "lineage_tokens": 512,
        "log_digest": recorded.headers[1].digest.hex(),
        "state_digest": recorded.states[2].state_digest.hex(),
        "agreeing": 0,
    }


def test_amendments_are_told_where_they_begin_to_count(small_config: RunConfig, network: Network) -> None:
    organiser = Identity.generate()
    run = Run.sign(small_config, organiser)
    first, second = (
        amendment(run, number, organiser, outer_learning_rate=rate, outer_momentum=0.5)
        for number, rate in ((1, 0.4), (2, 0.2))
    )
    network.recorded = record(run, np.ones(VALUES, np.float32), ENTRIES, amendments={0: first, 2: second})
    network.said = dict.fromkeys("ab", network.recorded.states[-1].state_digest)
    result = follow(network.recorded, "--until", ENTRIES)
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if "amendment" in line] == [
        "outer step 1: from the next one on, by amendment 1: outer learning rate 0.4 instead of 0.7, "
        "outer momentum 0.5 instead of 0.6",
        "outer step 3: from the next one on, by amendment 2: outer learning rate 0.2 instead of 0.4",
    ]
    [told, _] = [one for one in news(follow(network.recorded, "--until", 3, "--json")) if one["event"] == "amendment"]
    assert told == {
        "event": "amendment",
        "outer_step": 1,
        "number": 1,
        "outer_learning_rate": 0.4,
        "outer_momentum": 0.5,
        "inner_learning_rate_factor": 1.0,
        "decay": None,
        "outer_steps": 7,
        "weights": [1.0],
    }


@pytest.mark.parametrize(("outer_steps", "last"), [(2, 2), (1, 2), (20, ENTRIES)])
def test_it_ends_with_the_run_as_the_log_has_amended_it(
    outer_steps: int, last: int, small_content: dict[str, Any], network: Network
) -> None:
    """The second entry takes the amendment in, so that the run ends there at the earliest."""
    organiser = Identity.generate()
    run = Run.sign(RunConfig.from_manifest_content(small_content | {"outer_steps": ENTRIES - 1}), organiser)
    taken_in = {1: amendment(run, 1, organiser, outer_steps=outer_steps)}
    network.recorded = record(run, np.ones(VALUES, np.float32), ENTRIES, amendments=taken_in)
    network.said = dict.fromkeys("ab", network.recorded.states[-1].state_digest)
    until = () if last < ENTRIES else ("--until", ENTRIES)
    result = follow(network.recorded, *until)
    assert result.exit_code == 0, result.output
    entries = [line for line in result.stdout.splitlines() if "peers 2" in line]
    assert entries[-1].startswith(f"outer step {last}: ")


def test_a_peer_with_another_state_is_named_and_the_exit_code_says_so(recorded: RecordedRun, network: Network) -> None:
    lie = network.said["b"] = digest_of(b"lie")
    result = follow(recorded, "--until", ENTRIES)
    assert result.exit_code == 12
    expected = recorded.states[-1].state_digest
    *_, last, named = result.stdout.splitlines()
    assert last.endswith("1 peer agrees")
    assert named == (
        f"outer step 4: peer b DISAGREES: its state is {lie.hex()[:8]}, but the log leads to {expected.hex()[:8]}"
    )
    assert "error: 1 peer had another state than the log leads to, first b after outer step 4." in result.stderr
    assert news(follow(recorded, "--until", ENTRIES, "--json"))[-1] == {
        "event": "disagreement",
        "outer_step": 4,
        "peer": "b",
        "said": lie.hex(),
        "state_digest": expected.hex(),
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("agree", [True, False])
def test_a_signal_ends_it(
    number: int, agree: bool, recorded: RecordedRun, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for what comes after the last entry; what it has found out counts all the same."""
    if not agree:
        network.said["b"] = digest_of(b"lie")

    async def look(run_id: str) -> list[Heartbeat]:
        asked = [unpack(HeadersRequest, request) for _, name, request in network.pulls if name == HEADERS]
        followed = {request.first for request in asked if request.last == request.first + 1}  # entry after entry
        if len(followed) == ENTRIES - FROZEN:
            os.kill(os.getpid(), number)
        return network.beats

    monkeypatch.setattr(network, "heartbeats", look)
    result = follow(recorded)
    assert result.exit_code == (0 if agree else 12), result.output
    assert "outer step 4: peers 2" in result.stdout


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("every", "evaluated"), [(2, (2, 4)), (3, (3, 4))])
def test_every_nth_state_and_the_last_are_evaluated(
    recorded: RecordedRun, every: int, evaluated: tuple[int, int]
) -> None:
    result = follow(recorded, "--until", ENTRIES, "--every", every, "--evaluate")
    assert [line for line in result.stdout.splitlines() if "loss" in line] == [
        f"outer step {index}: held-out loss 2.500 (perplexity 12.2, 1.250 bits per byte)" for index in evaluated
    ]


def test_text_that_the_manifest_names_is_not_opened(recorded: RecordedRun, network: Network) -> None:
    """`network` lets no worker start."""
    invite = Invite(recorded.run.run_id, (f"/ip4/192.0.2.2/tcp/1/p2p/{Identity.generate().peer_id}",))
    result = CliRunner().invoke(main, ["follow", "--run", str(invite), "--evaluate"])
    assert result.exit_code == 7
    assert "what you have not named is not read" in result.stderr


@pytest.mark.usefixtures("model")
def test_a_model_is_exported_without_the_text(recorded: RecordedRun, tmp_path: Path) -> None:
    """Regression: the organiser had to name a text that only the held-out loss needs."""
    invite = Invite(recorded.run.run_id, (f"/ip4/192.0.2.2/tcp/1/p2p/{Identity.generate().peer_id}",))
    arguments = ["--until", "2", "--every", "2", "--export", str(tmp_path)]
    result = CliRunner().invoke(main, ["follow", "--run", str(invite), *arguments])
    assert result.exit_code == 0, result.output
    assert f"outer step 2: the model is in {tmp_path}/outer-step-000002" in result.stdout
    assert result.stderr.count("name a copy of the run's text with --data") == 1


@pytest.mark.usefixtures("model")
def test_every_nth_state_is_exported_and_pushed(recorded: RecordedRun, tmp_path: Path) -> None:
    models, there = tmp_path / "models", tmp_path / "there"
    (models / "outer-step-000002").mkdir(parents=True)
    (models / "outer-step-000002" / "mine").touch()
    arguments = ("--until", ENTRIES, "--every", 2, "--export", models, "--push-to", f"file://{there}", "--json")
    result = follow(recorded, *arguments)
    assert result.exit_code == 0, result.output
    made = [one for one in news(result) if one["event"] == "model"]
    assert [one["outer_step"] for one in made] == [2, 4]
    assert [one["held_out_loss"] for one in made] == [2.5, 2.5]
    assert made[1]["place"] == f"{models}/outer-step-000004 and file://{there}"
    assert sorted(path.name for path in models.iterdir()) == ["outer-step-000002", "outer-step-000004"]
    assert (models / "outer-step-000004" / "README.md").read_text() == "4"
    assert (there / "README.md").read_text() == "4"
    assert "outer-step-000002: Directory not empty" in result.stderr
    assert [path.name for path in (models / "outer-step-000002").iterdir()] == ["mine"]


@pytest.mark.usefixtures("model")
def test_a_remote_that_fails_is_tried_again(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opendiloco.errors import RemoteError
    from opendiloco.storage import remote

    pushed: list[str] = []

    def push(folder: Path, url: str) -> None:
        pushed.append(folder.name)
        raise RemoteError("it is down.")

    monkeypatch.setattr(remote, "push_folder", push)
    result = follow(recorded, "--until", ENTRIES, "--every", 2, "--push-to", f"file://{tmp_path}", "--json")
    assert result.exit_code == 0, result.output
    assert pushed == ["outer-step-000002", "outer-step-000004"]
    assert [one["place"] for one in news(result) if one["event"] == "model"] == [None, None]
    assert "it is down. This model is not pushed; the next model will be." in result.stderr


def test_what_cannot_be_used_is_found_out_at_once(recorded: RecordedRun, network: Network) -> None:
    assert follow(recorded, "--export", "/proc/models").exit_code == 6
    assert follow(recorded, "--push-to", "nowhere://models").exit_code == 10
    assert follow(recorded, "--every", 0).exit_code == 2
    assert not network.pulls
