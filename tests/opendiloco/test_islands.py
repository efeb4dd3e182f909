"""Machines of one volunteer: what torchrun tells them, what they say to each other, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.cli import main
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import IslandError
from opendiloco.island import agent as agent_module
from opendiloco.island import arrival as arrival_module
from opendiloco.island import first as first_module
from opendiloco.island import remote as remote_module
from opendiloco.island.agent import NodeAgent
from opendiloco.island.arrival import Connection, VolunteerLeftError, connect
from opendiloco.island.environment import Placement
from opendiloco.island.first import STRANGERS_AT_ONCE, gathered
from opendiloco.island.frames import (
    HEADER,
    LIMITS,
    PIECE,
    Ended,
    Frame,
    Hello,
    Kind,
    Place,
    Wanted,
    parse,
    read_frame,
    write_frame,
)
from opendiloco.island.greeting import end_key, key_of, proof
from opendiloco.island.greeting import versions as own_versions
from opendiloco.island.remote import RemoteNode
from opendiloco.model.card import RunFacts
from opendiloco.run import Run
from opendiloco.workers.control import ControlMessage, CountDevices, DevicesCounted, Export, Generate, KeepMoments
from opendiloco.workers.handle import WorkerDeathError
from opendiloco.workers.nodes import Nodes, Region
from opendiloco.workers.process import Inherited
from peers.values.identity import Identity
from peers.values.manifest import Invite

SECONDS = 120.0
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_without_torchrun_a_machine_is_alone() -> None:
    assert Placement.read({"HOME": "/root"}) is None
    assert Placement.read(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize("size", ["1", "4"])
def test_what_a_cluster_sets_without_torchrun_changes_nothing(size: str) -> None:
    """Slurm and Kubeflow, for whatever they start."""
    variables = {"WORLD_SIZE": size, "RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    assert Placement.read(variables) is None


def test_torchrun_says_which_machine_this_is() -> None:
    placement = Placement.read(TORCHRUN)
    assert placement == Placement(1, 2, "127.0.0.1", 29500, "job")
    assert not placement.is_first


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set", "torchrun --nnodes"),
        ({"RANK": "2"}, "RANK = '2'", "torchrun --nnodes"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE = '-1'", "torchrun --nnodes"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = '70000'", "torchrun --nnodes"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE = 4", "--nproc-per-node 1"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, "TORCHELASTIC_USE_AGENT_STORE", "TORCH_DISABLE_SHARE"),
    ],
)
def test_what_does_not_fit_is_named_with_its_value_and_a_remedy(
    changes: dict[str, str], field: str, remedy: str
) -> None:
    with pytest.raises(IslandError, match=field) as caught:
        Placement.read(TORCHRUN | changes)
    assert remedy in caught.value.remedy
    assert caught.value.exit_code == 15


def test_join_says_so_in_one_line_before_it_does_anything(small_config: RunConfig) -> None:
    key = Identity.generate()
    invite = Invite(Run.sign(small_config, key).run_id, (f"/ip4/127.0.0.1/tcp/1/p2p/{key.peer_id}",))
    environment = TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}
    done = CliRunner(env=environment).invoke(main, ["join", "--run", str(invite)])
    assert done.exit_code == 15
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: LOCAL_WORLD_SIZE = 4: torchrun has started 4 processes on this machine.")


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


class Sent:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("kind", Kind)
def test_a_frame_comes_back_as_it_was_sent(kind: Kind) -> None:
    frame = Frame(kind, 7, 1 << 40, b"x" * min(LIMITS[kind], 100))
    sent: Any = Sent()
    write_frame(sent, frame)
    assert asyncio.run(read(bytes(sent.data), kind)) == frame


async def read(data: bytes, *kinds: Kind) -> Frame:
    return await read_frame(reader_of(data), *kinds)


@pytest.mark.parametrize("kind", Kind)
def test_what_is_too_long_is_not_even_read(kind: Kind) -> None:
    with pytest.raises(IslandError, match=f"kind {kind.value} and {LIMITS[kind] + 1} bytes"):
        asyncio.run(read(HEADER.pack(kind, 0, 0, LIMITS[kind] + 1), kind))


def test_a_frame_that_nobody_waits_for_is_refused() -> None:
    with pytest.raises(IslandError, match="kind 12 and 0 bytes"):
        asyncio.run(read(HEADER.pack(Kind.LEAVE, 0, 0, 0), Kind.HELLO))


@given(st.binary(max_size=200))
def test_garbage_is_an_error_of_ours(data: bytes) -> None:
    for attempt in (data, struct.pack(">BIQI", Kind.HELLO, 0, 0, len(data)) + data):
        try:
            frame = asyncio.run(read(attempt, *Kind))
            parse(Hello, frame.body)
            parse(Wanted, frame.body)
        except IslandError:
            pass


class Store:
    """torchrun's store, played."""

    values: dict[str, str]

    async def set(self, key: str, value: str) -> None:
        self.values[key] = value

    async def get(self, key: str) -> str:
        while key not in self.values:
            await asyncio.sleep(0)
        return self.values[key]

    async def has(self, key: str) -> bool:
        return key in self.values


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    Store.values = {}

    @asynccontextmanager
    async def store_client(host: str, port: int) -> AsyncIterator[Store]:
        yield Store()

    for module in (arrival_module, first_module):
        monkeypatch.setattr(module, "store_client", store_client)


FIRST, SECOND = Placement(0, 2, "127.0.0.1", 29500, "job"), Placement(1, 2, "127.0.0.1", 29500, "job")


def left() -> None:
    pass


async def gather(use: Callable[[Nodes], Any], on_leave: Callable[[], None] = left) -> None:
    async with gathered(FIRST, "run-1", on_leave) as nodes:
        await use(nodes)


async def both(use: Callable[[Nodes], Any], on_leave: Callable[[], None] = left) -> None:
    """Have the first machine use the second one, which then ends by itself."""

    async def second() -> None:
        agent = NodeAgent(await connect(SECOND, "run-1"))
        await agent.serve()

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(gather(use, on_leave), second())


def test_bytes_go_to_the_other_machine_once_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * PIECE + 12
    data = memoryview(bytearray(os.urandom(size)))

    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        assert isinstance(node, RemoteNode)
        written, write = list[Frame](), node.write

        def note(frame: Frame) -> None:
            written.append(frame)
            write(frame)

        monkeypatch.setattr(node, "write", note)
        await node.resize(Region.MOMENTS, size)
        await node.send(Region.MOMENTS, data, (0, size), keeps=True)
        assert [frame.offset for frame in written if frame.kind is Kind.PUT] == [0, PIECE, 2 * PIECE]
        written.clear()
        before = bytes(data)
        data[PIECE] ^= 1
        await node.send(Region.MOMENTS, data, (0, size), keeps=True)
        assert [frame.offset for frame in written] == [PIECE]
        back = memoryview(bytearray(size))
        await node.fetch(Region.MOMENTS, back, [(3, 7), (PIECE - 1, size)])
        assert bytes(back[3:7]) == before[3:7]
        assert bytes(back[PIECE - 1 :]) == bytes(data[PIECE - 1 :])
        assert not any(back[7 : PIECE - 1])
        await node.sent()

    asyncio.run(both(use))


def test_the_first_machine_learns_what_others_have_kept_but_for_its_own() -> None:
    """On a disk that they share, a node sees what the volunteer itself has kept."""

    async def first() -> None:
        async with gathered(FIRST, "run-1", left, "peer-0") as nodes:
            assert [node.others_steps for node in nodes.others] == [7]

    async def second() -> None:
        kept = {"peer-0": 50, "peer-1": 7, "peer-2": 3}
        await NodeAgent(await connect(SECOND, "run-1", kept)).serve()

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(first(), second())

    asyncio.run(story())


def test_the_first_machine_listens_on_the_same_port_of_all_addresses() -> None:
    """When torchrun's store is at a name; several times, since a port is drawn each time."""

    async def first() -> None:
        async with gathered(replace(FIRST, host="first.example"), "run-1", left):
            pass

    async def second() -> None:
        agent = NodeAgent(await connect(SECOND, "run-1"))
        await agent.serve()

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(first(), second())

    for _ in range(8):
        Store.values.clear()
        asyncio.run(story())


def test_a_worker_there_answers_and_its_death_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that says how many GPUs it has, and then dies."""
    script = (
        "import os, socket, sys; s = socket.socket(fileno={}); s.recv(100);"
        's.sendall(b\'{{"kind": "devices_counted", "gpus": 3}}\\n\'); s.recv(100); print(\'no more\'); os._exit(7)'
    )

    async def spawn(control: int, descriptors: Inherited, threads: int) -> asyncio.subprocess.Process:
        import sys

        pipe: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
        code = script.format(control)
        return await asyncio.create_subprocess_exec(sys.executable, "-c", code, pass_fds=[control], **pipe)

    monkeypatch.setattr("opendiloco.workers.process._spawn", spawn)

    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        worker = await node.start_worker(1)
        worker.name = "worker 1 of 2"
        assert (await worker.exchange(CountDevices(), DevicesCounted, lambda progress: None)).gpus == 3
        with pytest.raises(WorkerDeathError, match=r"worker 1 of 2, on node 1: .* exit status 7.* no more"):
            await worker.exchange(CountDevices(), DevicesCounted, lambda progress: None)
        await worker.close()
        other = await node.start_worker(1)
        await other.close()

    asyncio.run(both(use))


def test_a_worker_there_keeps_moments_in_memory_and_takes_room_for_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Noting:
        """A worker that notes what it is told."""

        @classmethod
        async def start(cls, inherited: Inherited, threads: int) -> Noting:
            return cls()

        def write(self, message: ControlMessage) -> None:
            told.append(message)

        async def close(self) -> None:
            pass

    monkeypatch.setattr(agent_module, "_RelayedWorker", Noting)
    told = list[ControlMessage]()

    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        worker = await node.start_worker(1)
        worker.write(KeepMoments(path="/disk/of/the/first", run="run-1", index=3))

    asyncio.run(both(use))
    [command] = told
    assert isinstance(command, KeepMoments)
    assert command.path.startswith("/proc/self/fd/")
    assert not command.reserves


def test_somebody_there_can_ask_to_leave() -> None:
    async def story() -> None:
        asked = asyncio.Event()

        async def second() -> None:
            agent = NodeAgent(await connect(SECOND, "run-1"))
            agent.ask_to_leave()
            await agent.serve()

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(lambda nodes: asked.wait(), asked.set), second())

    asyncio.run(story())


def test_somebody_can_ask_to_leave_while_machines_are_still_missing() -> None:
    async def story() -> None:
        def stop() -> None:
            task.cancel()

        async def first() -> None:
            async with gathered(replace(FIRST, size=3), "run-1", stop):
                pytest.fail("a machine is missing")

        async def second() -> None:
            agent = NodeAgent(await connect(replace(SECOND, size=3), "run-1"))
            agent.ask_to_leave()
            await agent.serve()

        async with asyncio.timeout(SECONDS):
            task = asyncio.create_task(first())
            await second()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(story())


@pytest.fixture
def _let_in_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other machines find the first one, but cannot show that they know the secret, and look again and again."""
    monkeypatch.setattr(arrival_module, "proof", lambda *known: "no")
    monkeypatch.setattr(arrival_module, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(arrival_module, "BELIEVING_SECONDS", 0)
    monkeypatch.setattr(first_module, "LOOK_SECONDS", 0)


@pytest.mark.usefixtures("_let_in_nobody")
def test_the_first_machine_hears_that_one_leaves_which_was_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def story() -> None:
        def stop() -> None:
            first.cancel()

        async with asyncio.timeout(SECONDS):
            first = asyncio.create_task(gather(lambda nodes: asyncio.sleep(0), stop))
            second = asyncio.create_task(connect(SECOND, "run-1"))
            await Store().get(key_of(FIRST.job))
            second.cancel()
            for left in (second, first):
                with pytest.raises(asyncio.CancelledError):
                    await left

    asyncio.run(story())
    assert "node 1 is asked to leave before all machines are here: this volunteer leaves" in caplog.messages


@pytest.mark.usefixtures("_let_in_nobody")
def test_a_machine_that_is_asked_to_leave_before_it_is_let_in_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def story() -> None:
        leaving = asyncio.Event()

        def stop() -> None:
            first.cancel()

        async with asyncio.timeout(SECONDS):
            first = asyncio.create_task(gather(lambda nodes: asyncio.sleep(0), stop))
            second = asyncio.create_task(connect(SECOND, "run-1", leaving=leaving))
            await Store().get(key_of(FIRST.job))
            leaving.set()
            with pytest.raises(VolunteerLeftError, match="this machine was asked to leave"):
                await second
            with pytest.raises(asyncio.CancelledError):
                await first

    asyncio.run(story())
    assert "node 1 is asked to leave before all machines are here: this volunteer leaves" in caplog.messages


def test_a_machine_that_is_asked_to_leave_just_when_it_is_let_in_says_so_on_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: it hung up. The first machine had all whom it waited for, did not look into the store, and failed."""

    async def story() -> None:
        asked, leaving = asyncio.Event(), asyncio.Event()

        def is_asked_amid_the_greeting() -> dict[str, str]:
            leaving.set()
            return own_versions()

        monkeypatch.setattr(arrival_module, "versions", is_asked_amid_the_greeting)

        async def second() -> None:
            agent = NodeAgent(await connect(SECOND, "run-1", leaving=leaving))
            agent.ask_to_leave()
            await agent.serve()

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(lambda nodes: asked.wait(), asked.set), second())

    asyncio.run(story())


@pytest.mark.usefixtures("_let_in_nobody")
def test_a_machine_that_was_not_let_in_hears_that_the_first_one_leaves() -> None:
    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            first = asyncio.create_task(gather(lambda nodes: asyncio.sleep(0)))
            second = asyncio.create_task(connect(SECOND, "run-1"))
            await Store().get(key_of(FIRST.job))
            first.cancel()
            with pytest.raises(VolunteerLeftError, match="node 0 of this volunteer was asked to leave"):
                await second

    asyncio.run(story())


def test_a_machine_that_was_not_let_in_hears_which_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three, the third one wants to join another run, and the second one cannot reach the first."""
    dial = arrival_module._Arrival._dial

    async def dial_unless_second(arrival: arrival_module._Arrival, place: Place) -> Connection:
        if arrival._placement.rank == 1:
            raise OSError("out of reach")
        return await dial(arrival, place)

    async def come(rank: int, run: str) -> None:
        await connect(replace(SECOND, rank=rank, size=3), run)

    async def first() -> None:
        async with gathered(replace(FIRST, size=3), "run-1", left):
            pytest.fail("one of them does not fit")

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            machines = first(), come(1, "run-1"), come(2, "run-2")
            for error in await asyncio.gather(*machines, return_exceptions=True):
                assert isinstance(error, IslandError)
                assert "node 2 wants to join the run run-2, node 0 the run run-1" in error.message

    monkeypatch.setattr(arrival_module._Arrival, "_dial", dial_unless_second)
    monkeypatch.setattr(arrival_module, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(arrival_module, "BELIEVING_SECONDS", 0)
    asyncio.run(story())


def test_what_the_store_says_of_an_earlier_start_ends_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens where the first machine was then, and somebody had left."""
    monkeypatch.setattr(arrival_module, "AGAIN_SECONDS", 0)
    secret, ends = bytes(32), list[str]()
    Store.values[end_key(secret)] = Ended(by="node 0").packed().decode()

    async def check_end(arrival: object, place: Place) -> None:
        ends.append(place.secret)

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
            await Store().set(key_of(FIRST.job), Place(port=port, secret=secret.hex()).packed().decode())
            second = asyncio.create_task(connect(SECOND, "run-1"))
            for _ in range(20):
                await asyncio.sleep(0)
            serving = asyncio.create_task(gather(lambda nodes: asyncio.sleep(0)))
            await NodeAgent(await second).serve()
            await serving

    monkeypatch.setattr(arrival_module._Arrival, "_check_end", check_end)
    asyncio.run(story())
    assert not ends


def test_a_machine_that_is_lost_is_named_to_all_that_wait_for_it() -> None:
    async def story() -> None:
        async def use(nodes: Nodes) -> None:
            [node] = nodes.others
            worker = await node.start_worker(1)
            await asyncio.gather(gone(worker.wait_for_death()), gone(node.fetch(Region.VECTORS, data, [(0, 8)])))
            with pytest.raises(IslandError, match="node 1 of this volunteer is lost"):
                await node.start_worker(1)

        async def gone(waiting: Any) -> None:
            try:
                error = await waiting
            except IslandError as raised:
                error = raised
            assert "node 1 of this volunteer is lost" in str(error)

        data = memoryview(bytearray(8))

        async def second() -> None:
            reader, writer = await connect(SECOND, "run-1")
            assert (await read_frame(reader, Kind.START)).number == 0
            assert (await read_frame(reader, Kind.GET)).number == Region.VECTORS
            writer.close()

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(use), second())

    asyncio.run(story())


def test_a_machine_that_hangs_holds_up_neither_restart_nor_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its system answers, but nobody there does what we say."""
    monkeypatch.setattr(remote_module, "DEATH_SECONDS", 0.0)
    monkeypatch.setattr(remote_module, "GOODBYE_SECONDS", 0.0)

    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        worker = await node.start_worker(1)
        await worker.close()
        assert "node 1 of this volunteer does not answer" in str(await worker.wait_for_death())
        with pytest.raises(IslandError, match="does not answer"):
            await node.start_worker(1)

    async def second() -> None:
        reader, writer = await connect(SECOND, "run-1")
        await left_alone.wait()
        with suppress(ConnectionError):
            assert (await reader.read())[:1] == bytes([Kind.START])
        writer.close()

    async def first() -> None:
        await gather(use)
        left_alone.set()

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(first(), second())

    left_alone = asyncio.Event()
    asyncio.run(story())


@pytest.mark.parametrize(
    ("run", "versions", "said"),
    [
        ("run-2", {}, "node 1 wants to join the run run-2, node 0 the run run-1"),
        ("run-1", {"torch": "1.0"}, "node 1 has torch 1.0, node 0 has "),
    ],
)
def test_machines_that_differ_hear_both_why(
    run: str, versions: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_module, "versions", lambda: own_versions() | versions)

    async def story() -> tuple[object, object]:
        async with asyncio.timeout(SECONDS):
            machines = gather(lambda nodes: asyncio.sleep(0)), connect(SECOND, run)
            return await asyncio.gather(*machines, return_exceptions=True)

    for error in asyncio.run(story()):
        assert isinstance(error, IslandError)
        assert said in error.message
        assert error.remedy


def test_who_does_not_know_the_secret_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps nobody out: the store may still say what an earlier start wrote."""
    wrong = iter([True])
    monkeypatch.setattr(arrival_module, "proof", lambda *known: "no" if next(wrong, False) else proof(*known))

    async def use(nodes: Nodes) -> None:
        assert len(nodes.others) == 1

    asyncio.run(both(use))


def test_a_flood_of_strangers_keeps_no_machine_out_and_ends_with_the_gathering() -> None:
    """The oldest make room; the port is closed once all machines are there."""

    async def dial() -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(FIRST.host, await first_machines_port())
        writers.append(writer)
        await read_frame(reader, Kind.CHALLENGE)
        return reader

    async def use(nodes: Nodes) -> None:
        for reader in strangers:
            with pytest.raises(IslandError, match="lost"):
                await read_frame(reader, Kind.WELCOME)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(FIRST.host, await first_machines_port())

    async def second() -> None:
        strangers.extend([await dial() for _ in range(STRANGERS_AT_ONCE + 5)])
        for reader in strangers[:5]:
            with pytest.raises(IslandError, match="lost"):
                await read_frame(reader, Kind.WELCOME)
        agent = NodeAgent(await connect(SECOND, "run-1"))
        await agent.serve()
        for writer in writers:
            writer.close()

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(use), second())

    strangers, writers = list[asyncio.StreamReader](), list[asyncio.StreamWriter]()
    asyncio.run(story())


async def first_machines_port() -> int:
    return parse(Place, (await Store().get(key_of(FIRST.job))).encode()).port


def test_who_answers_as_the_first_machine_must_know_the_secret_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have its port by now: the node dials until the store says where the first machine is."""
    monkeypatch.setattr(arrival_module, "AGAIN_SECONDS", 0)
    welcomed = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        write_frame(writer, Frame(Kind.CHALLENGE, 0, 0, bytes(32)))
        await read_frame(reader, Kind.HELLO)
        write_frame(writer, Frame(Kind.WELCOME, 0, 0, proof(bytes(32), bytes(64)).encode()))
        welcomed.set()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        place = Place(port=server.sockets[0].getsockname()[1], secret="ab" * 32)
        await Store().set(key_of(FIRST.job), place.packed().decode())

        async def second() -> None:
            agent = NodeAgent(await connect(SECOND, "run-1"))
            await agent.serve()

        async def first() -> None:
            await welcomed.wait()
            await gather(lambda nodes: asyncio.sleep(0))

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(first(), second())
        server.close()

    asyncio.run(story())


def test_the_log_tells_of_a_few_wrong_proofs_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = iter([True] * 10)
    monkeypatch.setattr(arrival_module, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(arrival_module, "proof", lambda *known: "no" if next(wrong, False) else proof(*known))

    async def use(nodes: Nodes) -> None:
        assert len(nodes.others) == 1

    asyncio.run(both(use))
    assert sum("does not know torchrun's store" in record.message for record in caplog.records) == 3


FACTS = RunFacts(run_id="run-1", manifest_digest="00" * 32, outer_steps=3, tokens=640, peers=2, held_out_loss=5.0)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.PUT, 0, 0, b"beyond"),
        Frame(Kind.PUT, 9, 0, b""),
        Frame(Kind.GET, 0, 0, Wanted(parts=((0, 1),)).packed()),
        Frame(Kind.LINE, 0, 0, b"{}"),
        Frame(Kind.LINE, 0, 0, Generate(prompt="", tokens=1, seed=0, temperature=0.0).line()),
        Frame(Kind.LINE, 0, 0, Export(folder="/", facts=FACTS, dtype="float32").line()),
        Frame(Kind.GET, 0, 0, b"{}"),
        Frame(Kind.DIED, 0, 0, b"{}"),
    ],
)
def test_a_node_does_nothing_that_cannot_be_meant(frame: Frame) -> None:
    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        assert isinstance(node, RemoteNode)
        node.write(frame)
        worker = await node.start_worker(1)
        assert isinstance(await worker.wait_for_death(), IslandError)

    async def story() -> None:
        agent_ended = asyncio.Event()

        async def second() -> None:
            agent = NodeAgent(await connect(SECOND, "run-1"))
            with pytest.raises(IslandError):
                await agent.serve()
            agent_ended.set()

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(use), second())

    asyncio.run(story())


@pytest.mark.parametrize("lacking", [errno.ENOSPC, errno.EMFILE, errno.EAGAIN])
def test_what_a_node_lacks_is_told_on_both_machines(lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_process(*arguments: object) -> None:
        raise OSError(lacking, os.strerror(lacking))

    monkeypatch.setattr("opendiloco.workers.process._spawn", no_process)
    said = f"the machine cannot do its part: {os.strerror(lacking)}"

    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        worker = await node.start_worker(1)
        error = await worker.wait_for_death()
        assert isinstance(error, IslandError)
        assert error.message.startswith(f"node 1 of this volunteer is lost: {said}")
        assert "open files" in error.remedy

    async def second() -> None:
        agent = NodeAgent(await connect(SECOND, "run-1"))
        with pytest.raises(IslandError, match=said) as caught:
            await agent.serve()
        assert caught.value.exit_code == 15

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(use), second())

    asyncio.run(story())


def test_what_a_node_sends_unasked_costs_it_its_place() -> None:
    async def use(nodes: Nodes) -> None:
        [node] = nodes.others
        worker = await node.start_worker(1)
        assert "bytes that nobody wants" in str(await worker.wait_for_death())

    async def second() -> None:
        reader, writer = await connect(SECOND, "run-1")
        write_frame(writer, Frame(Kind.PUT, 0, 0, b"gift"))
        await read_frame(reader, Kind.START)
        await read_frame(reader, Kind.BYE)
        writer.close()

    async def story() -> None:
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(gather(use), second())

    asyncio.run(story())
