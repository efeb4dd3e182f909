"""What an archive has of a run, and what it says to who asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import RunConfig
from opendiloco.kernels import quantize_difference
from opendiloco.run import Run
from opendiloco.storage import archive as archives
from opendiloco.storage.archive import Archive, ArchivedRun, _DiskRoom, _NoRoomError
from opendiloco.storage.run_folder import read_curve
from opendiloco.training.codec import BLOCK_VALUES, BlockCodec
from peers import metrics
from peers.errors import LocalProtocolError
from peers.log.folder import LogFolder
from peers.log.head_signer import SIGNED
from peers.log.header import Fault, Header, Member
from peers.log.state import LogState
from peers.messages.messages import Certified, Elsewhere, Inquire
from peers.messages.packing import unpack_message
from peers.metrics import HEALTH
from peers.network import run_failures
from peers.network.channel import PeerRefusedError, PeerUnreachableError, RefusalError
from peers.network.known_runs import KnownRuns
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat, HeldOutLoss, PeerState
from peers.transfer.lineage_fetch import LineageFetch
from peers.transfer.payloads import Payloads, serve_proofs
from peers.transfer.snapshots import Snapshot
from peers.values.chunks import ChunkedPayload
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import SignedHead, SignedHeads, pack_heads
from peers.values.wire import digest_of
from peers.values.workload import SnapshotError
from tests.peers.fakes import FakeTransport
from tests.peers.heartbeats import beat
from tests.peers.logs import CERTIFIED, log_at, next_header

VALUES = 3000
NODE = Identity.generate()
CODEC = BlockCodec(kernels.INT8, VALUES)
BLOCK_BYTES = kernels.INT8.payload_size(BLOCK_VALUES)


class Network:
    """Where heartbeats go, and what a peer says of the run's archives; nobody else is there."""

    addresses = ("/ip4/127.0.0.1/tcp/1",)

    def __init__(self, manifest: SignedManifest) -> None:
        self.published: list[Heartbeat] = []
        self.runs = KnownRuns()
        self.runs.learn(manifest)
        self.heard = 0
        """The latest sequence of our own key that others have."""
        self.told: bytes | None = pack_heads([])
        """None: it does not answer."""

    async def call(self, peer: str, name: str, payload: bytes, timeout: float) -> bytes:
        if self.told is None:
            raise PeerUnreachableError(peer, "it is silent")
        return self.told

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        return self.runs.signed_heads_of(run_id)

    def credentials(self, run_id: str) -> tuple[bytes, int]:
        return b"ticket", 7

    def discovery_of(self, run_id: str) -> Any:
        return SimpleNamespace(copies=SimpleNamespace(highest=self.heard))

    async def publish(self, heartbeat: bytes, run_id: str) -> bool:
        self.published.append(Heartbeat.verify(heartbeat, run_id))
        return True

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        return []


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, Identity.generate())


def archive(run: Run, folder: Path, limit: int | None = None) -> ArchivedRun:
    return ArchivedRun(run, NODE, cast(HivemindTransport, Network(run.manifest)), folder, _DiskRoom(folder, limit))


def payload(seed: int) -> ChunkedPayload:
    theta, out = np.random.default_rng(seed).standard_normal(VALUES).astype(np.float32), CODEC.empty_payload()
    quantize_difference(theta, np.zeros_like(theta), out)
    return ChunkedPayload.cut(memoryview(bytes(out)), BLOCK_BYTES)


def positions(kept: ArchivedRun, entries: int) -> list[LogState]:
    """The log before, between and after so many entries that are put into the archive."""
    states = [kept.run.settings.empty_log]
    for number in range(entries):
        log, average = states[-1], payload(number)
        roster = [Member(peer="a", tokens=16, samples=log.leases.get("a", log.grants[0]))]
        header = next_header(log, roster, average.digest)
        kept.log.append(header, None, average)
        states.append(log.append(header))
    return states


def answer(kept: ArchivedRun, asker: LogState) -> object:
    """What a peer that is there in the log learns from the archive."""
    packed = kept.answer(Inquire(position=asker.position))
    return None if packed is None else unpack_message(kept.run.run_id, packed, asker)


def test_it_tells_what_followed_its_snapshot(run: Run, tmp_path: Path) -> None:
    """Its log begins there: of what came before it has the last header, in the snapshot."""
    states = positions(archive(run, tmp_path / "other"), 3)
    kept, last = archive(run, tmp_path), states[3].last
    assert last is not None
    kept.log.append(last, None, None)
    assert answer(kept, states[2]) == Elsewhere(position=kept.end.position)
    kept._snapshot = Snapshot(states[2].last, bytes(32), (), memoryview(b""))
    assert answer(kept, states[2]) == Certified(header=last, certificate=None)


def test_it_tells_what_followed_any_entry_that_it_has(run: Run, tmp_path: Path) -> None:
    states = positions(archive(run, tmp_path), 3)
    kept = archive(run, tmp_path)  # started again
    assert kept.end.position == states[-1].position
    for before, after in pairwise(states):
        assert answer(kept, before) == Certified(header=cast(Any, after.last), certificate=None)
    assert kept.answer(Inquire(position=states[-1].position)) is None
    elsewhere = kept.answer(Inquire(position=states[1].position.model_copy(update={"head": bytes(32)})))
    assert elsewhere is not None
    assert unpack_message(run.run_id, elsewhere, None) == Elsewhere(position=states[-1].position)


def test_it_says_that_it_is_an_archive(run: Run, tmp_path: Path) -> None:
    states = positions(archive(run, tmp_path), 2)
    kept = archive(run, tmp_path)
    asyncio.run(kept.publish(NODE))
    [heartbeat] = cast(Any, kept._transport).published
    assert heartbeat.state is PeerState.ARCHIVING
    assert (heartbeat.index, heartbeat.head) == (2, states[-1].position.head)
    assert (heartbeat.ticket, heartbeat.revocations) == (b"ticket", 7)


def test_its_heartbeats_follow_each_other_whatever_the_clock_does(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: two within a millisecond, or a clock that was set back, ended the archive of all runs."""
    kept, times = archive(run, tmp_path), iter([1000, 1000, 10, 10])
    network = cast(Any, kept._transport)
    monkeypatch.setattr(time, "time_ns", lambda: next(times) * 1_000_000_000)
    for _ in range(3):
        asyncio.run(kept.publish(NODE))
    network.heard = 2_000_000  # by ourselves, before a restart with a clock that is behind
    asyncio.run(kept.publish(NODE))
    assert [beat.sequence for beat in network.published] == [1_000_000, 1_000_001, 1_000_002, 2_000_001]


class ManyRuns(Network):
    """What an archive of several runs has of the network, in which one of them is poison."""

    def __init__(self, poison: str) -> None:
        self.poison = poison
        self.beats: dict[str, int] = {}
        self.forgotten: list[str] = []
        self.changed = asyncio.Event()

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        return SignedHeads(run_id)

    def discovery_of(self, run_id: str) -> Any:
        return SimpleNamespace(copies=SimpleNamespace(highest=0))

    async def publish(self, heartbeat: bytes, run_id: str) -> bool:
        if run_id == self.poison:
            raise LocalProtocolError("heartbeat 1 does not follow 1")
        self.beats[run_id] = self.beats.get(run_id, 0) + 1
        self.changed.set()
        return True

    def forget(self, run_id: str) -> None:
        self.forgotten.append(run_id)
        self.changed.set()

    async def nothing(self, *what: object, **how: object) -> None:
        pass

    on_call = on_pull = on_stream = nothing

    async def until(self, is_true: Callable[[], bool], lacking: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(30.0):
                while not is_true():
                    self.changed.clear()
                    await self.changed.wait()
        assert is_true(), lacking


@asynccontextmanager
async def keeping(network: ManyRuns, manifests: list[SignedManifest], folder: Path) -> AsyncIterator[None]:
    task = asyncio.create_task(Archive(NODE, folder).keep(cast(HivemindTransport, network), manifests))
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def invited(small_config: RunConfig, **changes: Any) -> SignedManifest:
    """A run in which an archive says that it is there, though nobody else is."""
    content = small_config.to_manifest_content() | {"admission": {"mode": "invite"}} | changes
    content["rounds"] |= {"heartbeat_seconds": 0.1}
    return SignedManifest.create(Identity.generate(), "invited", content)


@pytest.mark.parametrize("poison", ["heartbeats", "folder", "content"])
def test_a_run_that_cannot_be_kept_ends_no_other(
    small_config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    poison: str,
) -> None:
    """Regression: whatever went wrong with one ended the archive of all, also at the next start."""
    monkeypatch.setattr(archives, "POLL", 0.01)
    good = invited(small_config)
    bad = invited(small_config, **({"outer_steps": -1} if poison == "content" else {}))
    if poison == "folder":
        (tmp_path / bad.run_id).write_text("not a folder")

    async def scenario() -> None:
        network = ManyRuns(bad.run_id if poison == "heartbeats" else "")
        async with keeping(network, [bad, good], tmp_path):
            await network.until(lambda: network.beats.get(good.run_id, 0) >= 3, "the other run is not kept")
        assert set(network.beats) == {good.run_id}

    asyncio.run(scenario())
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert bad.run_id in record.getMessage()
    assert [bad.run_id in reason for reason in HEALTH.reasons] == [True] * (poison == "folder")


def test_the_peers_of_a_new_run_are_soon_looked_for(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a run of ten seconds could leave nothing in the archive, which looked every five seconds."""
    monkeypatch.setattr(archives, "POLL", 60.0)
    manifests, looks = list[SignedManifest](), list[str]()

    class Looks(ManyRuns):
        async def heartbeats(self, run_id: str) -> list[Heartbeat]:
            looks.append(run_id)
            self.changed.set()
            return []

    async def scenario() -> None:
        network = Looks("")
        async with keeping(network, manifests, tmp_path):
            await asyncio.sleep(0)
            manifests.append(Run.sign(small_config, Identity.generate()).manifest)
            await network.until(lambda: len(looks) > 1, "the archive waits for long before it looks again")

    asyncio.run(scenario())
    many = Archive(NODE, tmp_path)
    many._runs = dict.fromkeys(map(str, range(1000)), cast(Any, None))
    assert many._poll == 60.0, "the looks at many idle runs take time from the others"


def test_a_run_that_the_node_has_forgotten_is_kept_no_more(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what it does for runs that nobody uses would become more and more."""
    monkeypatch.setattr(archives, "POLL", 0.01)
    manifests = [invited(small_config), invited(small_config), invited(small_config)]
    positions(archive(Run.from_manifest(manifests[2]), tmp_path), 2)
    first, second, full = (manifest.run_id for manifest in manifests)

    async def scenario() -> None:
        network = ManyRuns("")
        async with keeping(network, manifests, tmp_path):
            await network.until(lambda: set(network.beats) == {first, second, full}, "not all are kept")
            del manifests[2], manifests[0]
            await network.until(lambda: set(network.forgotten) == {first, full}, "others are kept on")
            beats = dict(network.beats)
            await network.until(lambda: network.beats[second] >= beats[second] + 3, "the second is kept no more")
            assert network.beats[first] == beats[first]
        kept = {path.name for path in tmp_path.iterdir() if path.is_dir()}
        assert kept == {second, full}, "work was removed, or an empty run was not"

    asyncio.run(scenario())


# Room on the disk -------------------------------------------------------------------------------------------------
def test_a_run_that_is_too_large_is_not_fetched_until_there_is_room(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a stranger's run, however large, was fetched whole, and filled the disk of all."""
    kept, fetched = archive(run, tmp_path, limit=40_000_000), list[str]()
    states = positions(archive(run, tmp_path / "theirs"), 1)
    beat = Heartbeat.model_construct(
        peer="a", state=PeerState.TRAINING, index=1, lineage_tokens=16, sequence=1, head=bytes(32), addresses=()
    )
    found = SimpleNamespace(log=states[1], entries=[(states[1].last, None)], support=None)

    async def fetch_payload(payloads: object, header: Header, donors: object) -> None:
        fetched.append("payload")
        kept.buffers[0].kept.keep(payload(0))

    monkeypatch.setattr(archives, "next_in_log", answering(found))
    monkeypatch.setattr(Payloads, "fetch", fetch_payload)
    theirs = SimpleNamespace(has=lambda place: True, contradiction=lambda signed: None)
    monkeypatch.setattr(LineageFetch, "compare", answering(SimpleNamespace(theirs=theirs)))
    monkeypatch.setattr(kept._uncertified_wait, "may_follow", lambda *asked: True)
    kept._snapshot = cast(Any, SimpleNamespace(index=1))
    network = cast(Any, kept._transport)
    network.connect = answering(True)

    keeping = Archive(NODE, tmp_path)

    def look(state_bytes: int, index: int = 1) -> list[str]:
        network.heartbeats = answering([beat.model_copy(update={"index": index})])
        caplog.clear()
        if kept.end.last is not None:
            kept._state_bytes, kept.buffers = 0, ()  # else asked for anew: what peers told may have been a lie
        monkeypatch.setattr(archives, "ask_size", answering(state_bytes))
        keeping._following.forget(run.run_id)  # it is due at once
        asyncio.run(keeping._keep_up(kept, {}))
        return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]

    with monkeypatch.context() as context:
        context.setattr("opendiloco.shared_memory.available_memory", lambda: 1000)
        assert "use a machine with more memory" in look(8 * VALUES)[0]
    assert (fetched, kept.end.last) == ([], None), "there is no memory for a payload"
    [said] = look(20_000_000)
    assert run.run_id in said
    assert "raise --max-disk" in said
    assert look(20_000_000) == [], "it was said before"
    assert not fetched
    assert HEALTH.reasons == [], "no entry shows that the run is as large as a peer claims"
    with pytest.raises(_NoRoomError):
        asyncio.run(kept._keep_snapshot([beat], ["a"], 0))
    assert look(8 * VALUES) == []
    assert (fetched, kept.end) == (["payload"], states[1])
    left = metrics.ARCHIVED_STEPS_LEFT.labels(run.run_id)._value.get()
    assert left == run.config.total_outer_steps - 1, "alerts leave out a run that is over"
    assert len(look(20_000_000, index=2)) == 1, "it fitted meanwhile"
    assert fetched == ["payload"]
    [reason] = HEALTH.reasons
    assert f"entries of run {run.run_id} cannot be archived: the next data need" in reason
    monkeypatch.setattr(kept, "follow", answering(True))
    look(8 * VALUES)
    assert HEALTH.reasons == []


def test_what_is_fetched_of_one_run_is_counted_for_all(tmp_path: Path) -> None:
    """Else many that begin at once fill the disk together."""
    for name in ("old", "a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "old" / "file").write_bytes(bytes(20_480))
    room = _DiskRoom(tmp_path, 40_960 + 8192)
    room.measure()

    async def scenario() -> None:
        with pytest.raises(_NoRoomError, match=r"need 12.3 kB of disk"):
            async with room.held("a", 12_289):  # a quarter is 12,288
                raise AssertionError
        async with room.held("a", 12_288), room.held("b", 12_288):
            with pytest.raises(_NoRoomError):
                async with room.held("c", 8192):
                    raise AssertionError
        async with room.held("c", 8192):
            pass
        (tmp_path / "a" / "file").write_bytes(bytes(4096))
        with pytest.raises(_NoRoomError, match=r"has 4.1 kB"):
            async with room.held("a", 12_288):
                raise AssertionError
        room.forget("old")
        async with room.held("b", 12_288), room.held("c", 12_288), room.held("d", 12_288):
            pass

    asyncio.run(scenario())


def test_most_of_the_disk_is_for_runs_unless_the_owner_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=40_000))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_bytes(bytes(8192))
    room = _DiskRoom(tmp_path)
    room.measure()

    async def scenario() -> None:
        async with room.held("a", 10_000):
            pass
        with pytest.raises(_NoRoomError, match=r"may have 10.8 kB; all runs have 8.19 kB of 43.4 kB"):
            async with room.held("a", 11_000):
                raise AssertionError

    asyncio.run(scenario())


def test_a_full_disk_is_reported_before_any_run_needs_it(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the node stayed healthy until a run with entries could not be kept."""
    monkeypatch.setattr(archives, "POLL", 0.01)
    free = [999_999]
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[0]))

    async def scenario() -> None:
        network = ManyRuns("")
        async with keeping(network, [invited(small_config)], tmp_path):
            await network.until(lambda: len(HEALTH.reasons) > 0, "the full disk is not reported")
            [reason] = HEALTH.reasons
            assert f"the disk of the archive {tmp_path} is full: free some space" in reason
            free[0] = 1_000_000
            await network.until(lambda: not HEALTH.reasons, "the free disk is not reported")

    asyncio.run(scenario())


def test_it_refuses_a_snapshot_that_it_does_not_have(run: Run, tmp_path: Path) -> None:
    kept = archive(run, tmp_path)
    with pytest.raises(RefusalError):
        asyncio.run(kept.newest(0))
    assert kept.held(bytes(32)) is None


def test_without_anybody_there_it_waits(run: Run, tmp_path: Path) -> None:
    kept = archive(run, tmp_path)
    asyncio.run(kept.follow())
    assert kept.end.last is None


def test_it_keeps_the_losses_that_peers_tell_of_steps_that_they_have_taken(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: only a node with a dashboard did, so that an export from an archive had no curve."""
    kept, every = archive(run, tmp_path), run.config.evaluation.every
    log = log_at(every + 1)
    told = [(every, 2.5), (every + 1, 1.0), (2 * every, 0.5)]
    beats = [beat(f"peer{step}", log, held_out=HeldOutLoss(index=step, loss=loss)) for step, loss in told]
    monkeypatch.setattr(Network, "heartbeats", answering(beats))
    monkeypatch.setattr(Network, "connect", answering(None), raising=False)
    monkeypatch.setattr(archives, "ask_size", failing)
    with pytest.raises(PeerUnreachableError):
        asyncio.run(kept.follow())
    assert read_curve(kept.folder.held_out) == {every: 2.5}


def test_who_says_most_and_has_nothing_that_is_kept_does_not_keep_it_from_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a stranger that showed an entry that nobody had signed was the only one to be asked."""
    kept, asked = archive(run, tmp_path), list[str]()
    [_, after] = positions(archive(run, tmp_path / "theirs"), 1)
    monkeypatch.setattr(archives, "ask_size", answering(8 * VALUES))

    async def keep_next(donors: Sequence[str], beats: Sequence[Heartbeat]) -> bool:
        asked.append(donors[0])
        if donors[0] == "honest":
            kept.end = after
        return donors[0] == "honest"

    async def nothing(*arguments: object) -> None:
        asked.append("log of " + cast(Any, arguments[0])[0])

    beats = [
        Heartbeat.model_construct(
            peer=peer,
            state=PeerState.TRAINING,
            index=1,
            lineage_tokens=tokens,
            sequence=1,
            head=bytes(32),
            addresses=(),
        )
        for peer, tokens in (("honest", 16), ("stranger", 2**61))
    ]
    monkeypatch.setattr(kept, "_keep_next", keep_next)
    monkeypatch.setattr(kept, "_complete_log", nothing)
    kept._snapshot = cast(Any, SimpleNamespace(index=1))
    network = cast(Any, kept._transport)
    network.heartbeats, network.connect = answering(beats), answering(True)
    asyncio.run(kept.follow())
    assert asked == ["stranger", "honest", "log of honest"]
    assert kept.end == after


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (PeerRefusedError("b", "ask again later"), "INFO"),
        (SnapshotError("b refused"), "INFO"),
        (OSError("no disk"), "ERROR"),
    ],
)
def test_a_peer_that_is_busy_or_gone_is_nothing_to_warn_of(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    level: str,
) -> None:
    """Regression: a peer that was busy was asked again, and told of, twice a second. It is asked again after a
    second, two, and so on, and told of once."""
    asked, seconds = list[float](), 0.0

    async def fail(*arguments: object) -> bool:
        asked.append(seconds)
        raise error

    kept, network = archive(run, tmp_path), cast(Any, Network(run.manifest))
    fields: dict[str, Any] = {"state": PeerState.TRAINING, "index": 1, "lineage_tokens": 16, "sequence": 1}
    beat = Heartbeat.model_construct(peer="b", head=bytes(32), addresses=(), **fields)
    network.heartbeats, network.connect = answering([beat]), answering(True)
    monkeypatch.setattr(archives, "ask_size", answering(8 * VALUES))
    monkeypatch.setattr(kept, "_transport", network)
    monkeypatch.setattr(kept, "_keep_up_with", fail)
    monkeypatch.setattr(kept, "_complete_log", answering(None))
    kept._snapshot = cast(Any, SimpleNamespace(index=1))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(run_failures, "now", lambda: seconds)
    keeping = Archive(NODE, tmp_path)
    for at in (0.0, 0.5, 1.0, 2.5, 3.0, 6.5, 7.0):
        seconds = at
        asyncio.run(keeping._keep_up(kept, {}))
    assert asked == [0.0, 1.0, 3.0, 7.0]
    told = [record.levelname for record in caplog.records if str(error) in record.getMessage()]
    assert told == [level]


async def failing(*_: object) -> None:
    raise PeerUnreachableError("a", "it is silent")


def answering(what: object) -> Callable[..., Awaitable[object]]:
    async def answer(*asked: object) -> object:
        return what

    return answer


def test_it_keeps_what_proves_the_annexes_of_its_entries(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it had headers and payloads, and of whom they exclude no proof."""
    kept, shown = archive(run, tmp_path), b"proof"
    fault = Fault(peer="b", kind="votes", proof=digest_of(shown))
    log = kept.run.settings.empty_log
    first = next_header(
        log,
        [Member(peer=peer, tokens=16, samples=log.grants[place]) for place, peer in enumerate("ab")],
        payload(1).digest,
    )
    log = log.append(first)
    second = next_header(log, [log.expected("a")], payload(2).digest, [fault])
    for header in (first, second):
        kept.log.append(header, None, None)
    kept.end = log.append(second)
    theirs = LogFolder.open(tmp_path / "theirs", log.at(None), BLOCK_BYTES)
    theirs.keep_proofs([shown])
    kept.buffers, kept._snapshot = cast(Any, object()), cast(Any, SimpleNamespace(index=2))
    beat = Heartbeat.model_construct(
        peer="a", state=PeerState.TRAINING, index=3, lineage_tokens=99, sequence=1, head=bytes(32), addresses=()
    )
    me, donor = FakeTransport("me"), FakeTransport("a")
    me.donors["a"] = donor
    monkeypatch.setattr(kept, "_keep_next", answering(False))
    network = cast(Any, kept._transport)
    network.heartbeats, network.connect = answering([beat]), answering(True)
    network.pull, network.reach_of = me.pull, me.reach_of

    async def scenario() -> None:
        await serve_proofs(donor, {run.run_id: theirs})
        await kept.follow()

    asyncio.run(scenario())
    assert kept.log.proof(fault.proof) == shown


# Signing ----------------------------------------------------------------------------------------------------------
def test_an_archive_of_the_run_signs_what_it_has_checked(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most once a minute; and it says so in its heartbeats."""
    clock = 1000.0
    monkeypatch.setattr("opendiloco.storage.archive.now", lambda: clock)
    monkeypatch.setattr("peers.log.head_signer.prove", lambda *asked: CERTIFIED)
    monkeypatch.setattr("peers.log.folder.RunLog.certificate_at", lambda log, *place: "a certificate")
    content = small_config.to_manifest_content() | {"archives": [NODE.peer_id]}
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    kept = archive(run, tmp_path)
    known = cast(Any, kept._transport).signed_heads_of

    def signed() -> list[int]:
        asyncio.run(kept.sign())
        return [head.index for head in known(run.run_id).heads]

    assert signed() == []
    positions(kept, 2)
    assert signed() == [], "no peer is there"
    kept._peers = frozenset({"a"})
    assert signed() == [2]
    kept.log.append(*next_of(kept.log.log_after(2)))
    assert signed() == [2], "not yet"
    clock += 61.0
    assert signed() == [2, 3]
    asyncio.run(kept.publish(NODE))
    [heartbeat] = cast(Any, kept._transport).published
    assert heartbeat.signed == known(run.run_id).newest


def test_an_archive_hears_what_it_has_signed_before_it_signs(
    small_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: with a disk that was set back it signed another log than before, and nobody believed it any more."""
    clock = 1000.0
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("opendiloco.storage.archive.now", lambda: clock)
    monkeypatch.setattr("peers.log.head_signer.prove", lambda *asked: CERTIFIED)
    monkeypatch.setattr("peers.log.folder.RunLog.certificate_at", lambda log, *place: "a certificate")
    run = Run.sign(small_config, NODE)
    kept = archive(run, tmp_path)
    positions(kept, 2)
    kept._peers = frozenset({"a"})
    network = cast(Any, kept._transport)
    network.told = None
    asyncio.run(kept.sign())
    assert "no peer has reported this archive's earlier signatures" in caplog.text
    elsewhere = SignedHead.sign(run.run_id, 1, bytes(32), NODE.peer_id, NODE)
    network.told = pack_heads([elsewhere])
    clock += 61.0
    asyncio.run(kept.sign())
    assert "this key has signed another outer step 1" in caplog.text
    assert network.signed_heads_of(run.run_id).heads == (elsewhere,)


def test_an_archive_goes_by_what_others_have_signed_until_it_has_signed_itself(
    small_config: RunConfig, tmp_path: Path
) -> None:
    """Else one stolen key could keep all archives from the run's log."""
    other = Identity.generate()
    content = small_config.to_manifest_content() | {"archives": [NODE.peer_id, other.peer_id]}
    run = Run.sign(RunConfig.from_manifest_content(content), Identity.generate())
    kept = archive(run, tmp_path)
    head = positions(kept, 2)[1].position.head
    store = cast(Any, kept._transport).runs
    assert not kept._is_contradicted
    store.take_heads(run.run_id, [SignedHead.sign(run.run_id, 2, bytes(32), other.peer_id, other)])
    assert kept._is_contradicted
    store.take_heads(run.run_id, [SignedHead.sign(run.run_id, 1, head, NODE.peer_id, NODE)])
    assert not kept._is_contradicted


def test_an_archive_goes_on_though_what_it_signed_last_cannot_be_read(
    small_config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.sign(small_config, NODE)
    archive(run, tmp_path)
    [folder] = {path.parent for path in tmp_path.rglob("log")}
    (folder / SIGNED).write_bytes(b"garbage")
    kept = archive(run, tmp_path)
    positions(kept, 2)
    asyncio.run(kept.sign())
    assert "this archive signs no outer step" in caplog.text
    assert "the file of this archive's last signed head" in caplog.text


def next_of(log: LogState | None) -> tuple[Header, None, None]:
    assert log is not None
    roster = [Member(peer="a", tokens=16, samples=log.leases["a"])]
    return next_header(log, roster, bytes(32)), None, None


def test_an_archive_that_the_run_does_not_name_signs_nothing(run: Run, tmp_path: Path) -> None:
    kept = archive(run, tmp_path)
    positions(kept, 2)
    asyncio.run(kept.sign())
    assert cast(Any, kept._transport).signed_heads_of(run.run_id).heads == ()


def test_an_archive_does_not_sign_what_too_few_have_signed(
    small_config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.sign(small_config, NODE)
    kept = archive(run, tmp_path)
    positions(kept, 2)
    kept._peers = frozenset({"a"})
    asyncio.run(kept.sign())
    assert cast(Any, kept._transport).signed_heads_of(run.run_id).heads == ()
    assert "this archive does not sign its log: entry 0 is not certified" in caplog.text
