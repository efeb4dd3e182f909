"""What the dashboard's server answers, and to whom."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from opendiloco.cli.group import main
from opendiloco.dashboard import server, watching
from opendiloco.dashboard.server import POLICY, _application, bind, url_of
from opendiloco.dashboard.watching import (
    NO_ARCHIVE,
    NodeSources,
    RunHistory,
    RunWatch,
    RunWatches,
    Source,
    volunteer_source,
)
from opendiloco.settings.join_settings import split_address
from opendiloco.storage.run_folder import HeldOutCurve
from peers.errors import LocalNetworkError, OwnAddressError, SwarmUnreachableError
from peers.log.folder import RunLog
from peers.network.transport import HivemindTransport
from peers.presence.heartbeat import Heartbeat, HeldOutLoss
from peers.values.identity import Identity
from peers.values.manifest import SignedManifest
from peers.values.signed_heads import NOTHING_SIGNED, SignedHeads
from tests.opendiloco.dashboard.invented import HOSTILE, PEERS, Story, invented_run, said

STATIC = Path(server.__file__).parent / "static"
LIMIT = 20.0  # seconds that anything may take


@pytest.fixture
def story() -> Story:
    return Story(3)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watching, "WATCHED_SECONDS", 0.01)


@asynccontextmanager
async def serving(*sources: Source) -> AsyncIterator[TestClient]:  # type: ignore[type-arg]
    watched = RunWatches(lambda: sources)
    looking = asyncio.create_task(watched.keep_updating())
    try:
        async with asyncio.timeout(LIMIT):
            while not all(watch.board.sections for watch in watched.runs.values()) or not watched.runs:
                await asyncio.sleep(0.01)
            async with TestClient(TestServer(_application(watched, is_local=True))) as client:
                yield client
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def asking(story: Story, ask: Callable[[TestClient], Awaitable[None]]) -> None:  # type: ignore[type-arg]
    async def scenario() -> None:
        async with serving(story.source) as client:
            await ask(client)

    asyncio.run(scenario())


async def event(answer: ClientResponse) -> tuple[str, str]:
    """The next event that is told, its name and what it says."""
    name = ""
    while True:
        line = (await answer.content.readline()).decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, line.removeprefix("data: ")


def test_every_answer_forbids_all_that_is_not_from_here(story: Story) -> None:
    async def ask(client: TestClient) -> None:  # type: ignore[type-arg]
        for path in ("/", "/app.js", "/style.css", "/api/runs", "/events", "/nothing"):
            async with client.get(path) as answer:
                assert answer.headers["Content-Security-Policy"] == POLICY, path
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert "Server" not in answer.headers
                assert "Set-Cookie" not in answer.headers
        assert "unsafe" not in POLICY

    asking(story, ask)


def test_the_page_has_neither_inline_script_nor_style_nor_anything_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert "<style" not in page
    assert " style=" not in page
    assert "onclick" not in page
    assert page.count("<script") == page.count('<script type="module" src="app.js"></script>') == 1
    for path in STATIC.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "") or path.suffix == ".js", path
        assert "http:" not in text
        assert "https:" not in text
        for dangerous in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert dangerous not in text, f"{path.name}: what peers say must stay text"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("low", [0, 2**53, 2**61, 1e300])
def test_an_axis_has_an_end_wherever_it_begins(low: float) -> None:
    script = base64.b64encode((STATIC / "charts.js").read_bytes()).decode()
    program = f"""
        const {{ ticks }} = await import("data:text/javascript;base64,{script}");
        console.log(ticks({low!r}, {low + 1!r}, 10).found.length);
    """
    command = ["node", "--input-type=module", "--eval", program]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    assert int(found.stdout) <= 50


def test_events_tell_the_state_and_then_what_is_new(story: Story) -> None:
    async def ask(client: TestClient) -> None:  # type: ignore[type-arg]
        async with client.get(f"/runs/{story.run.run_id}/events") as answer:
            assert answer.content_type == "text/event-stream"
            told = dict([await event(answer) for _ in range(5)])
            assert set(told) == {"run", "peers", "losses", "rounds", "contributions"}
            assert HOSTILE in [row["trouble"] for row in json.loads(told["peers"])["rows"]]
            assert all("\n" not in text for text in told.values())
            story.step()
            while True:
                name, text = await event(answer)
                if name == "run" and json.loads(text)["outer_step"] == 4:
                    break

    asking(story, ask)


def test_runs_are_listed_and_unknown_ones_are_not_found(story: Story) -> None:
    async def ask(client: TestClient) -> None:  # type: ignore[type-arg]
        async with client.get("/api/runs") as answer:
            [row] = await answer.json()
            assert (row["run"], row["outer_step"], row["peers"]) == (story.run.run_id, 3, 3)
        async with client.get(f"/api/runs/{story.run.run_id}") as answer:
            assert (await answer.json())["run"]["name"] == "tiny"
        for path in ("/runs/tiny-x/events", "/api/runs/tiny-x", "/static/../server.py", "/index.html"):
            async with client.get(path) as answer:
                assert answer.status == 404, path
        async with client.get("/events") as answer:
            assert (await event(answer))[0] == "runs"

    asking(story, ask)


def test_nothing_can_be_changed(story: Story) -> None:
    async def ask(client: TestClient) -> None:  # type: ignore[type-arg]
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            async with client.request(method, "/api/runs") as answer:
                assert answer.status == 405

    asking(story, ask)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("::1", 421),
        ("localhost:port", 421),
        ("\xff\xfe", 421),
    ],
)
def test_a_web_site_cannot_read_it_through_a_browser(story: Story, host: str, status: int) -> None:
    async def ask(client: TestClient) -> None:  # type: ignore[type-arg]
        async with client.get("/api/runs", headers={"Host": host}) as answer:
            assert answer.status == status

    asking(story, ask)


def test_a_source_that_fails_shows_what_was_known(story: Story) -> None:
    calls = 0

    async def heartbeats() -> list[Heartbeat]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise SwarmUnreachableError("nobody is there.", "Try again.")
        return await story.heartbeats()

    async def scenario() -> None:
        async with serving(replace(story.source, heartbeats=heartbeats)) as client:
            async with client.get(f"/runs/{story.run.run_id}/events") as answer:
                await event(answer)
                while calls < 3:
                    await asyncio.sleep(0.01)
            async with client.get("/api/runs") as answer:
                [row] = await answer.json()
                assert row["outer_step"] == 3

    asyncio.run(scenario())


def test_one_run_that_cannot_be_shown_leaves_all_others_as_they_are(
    story: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other, summary = invented_run("other"), RunHistory.summary

    def summary_with_a_mistake(history: RunHistory) -> dict[str, Any]:
        is_wrong = history.view.run is other and history.view.outer_step > 3
        return summary(history) | ({"tokens_per_second": math.inf} if is_wrong else {})

    monkeypatch.setattr(RunHistory, "summary", summary_with_a_mistake)
    monkeypatch.setattr(watching, "UNWATCHED_SECONDS", 0.01)

    async def scenario() -> None:
        async with serving(replace(story.source, run=other), story.source) as client, client.get("/events") as answer:
            await event(answer)
            story.step()
            while True:
                rows = {row["run"]: row for row in json.loads((await event(answer))[1])}
                if rows[story.run.run_id]["outer_step"] == 4:
                    break
            assert rows[other.run_id]["outer_step"] == 3
            while f"cannot update run {other.run_id}" not in caplog.text:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_while_nobody_can_say_which_runs_there_are_the_known_ones_are_shown(
    story: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def sources() -> list[Source]:
        nonlocal calls
        calls += 1
        if 1 < calls < 4:
            raise KeyError("a mistake")
        return [story.source]

    async def scenario() -> None:
        watched = RunWatches(sources)
        looking = asyncio.create_task(watched.keep_updating())
        async with asyncio.timeout(LIMIT):
            while calls < 5 or not json.loads(watched.board.sections["runs"]):
                await asyncio.sleep(0.01)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert len(watched.runs) == 1

    asyncio.run(scenario())
    assert caplog.text.count("cannot update its list of runs") == 1


# Sources --------------------------------------------------------------------------------------------------------
class Network:
    addresses = ("/ip4/192.0.2.2/tcp/1/p2p/Node",)

    async def heartbeats(self, run_id: str) -> list[Heartbeat]:
        return []

    def signed_heads_of(self, run_id: str) -> SignedHeads:
        return NOTHING_SIGNED


NETWORK = cast(HivemindTransport, Network())


def test_a_node_shows_the_runs_that_it_remembers_and_the_logs_that_it_keeps(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Archived:
        log = story.invented.log
        held_out = story.source.held_out

    other = invented_run("other")
    kept: dict[str, Archived] = {}
    bare, sources = NodeSources(NETWORK, None), NodeSources(NETWORK, kept.get)  # type: ignore[arg-type]
    manifests: list[SignedManifest] = [story.run.manifest, other.manifest]
    assert [source.no_log for source in bare.current(manifests)] == [NO_ARCHIVE, NO_ARCHIVE]
    assert [source.log() for source in sources.current(manifests)] == [None, None]
    kept[story.run.run_id] = Archived()
    first, second = sources.current(manifests)
    assert isinstance(first.log(), RunLog)
    assert second.log() is None
    assert sources.current(manifests)[0] is first
    monkeypatch.setattr(watching, "UPDATE_SECONDS", 0.0)
    assert sources.current(manifests[1:]) == [second], "a run that was forgotten"


def test_a_run_whose_log_was_opened_is_read_at_once(story: Story) -> None:
    """Not half a minute later."""
    watch = RunWatch(replace(story.source, log=lambda: None))
    asyncio.run(watch.update())
    watch.take(watch.source)
    assert not watch.is_due(watch.updated_at)
    watch.take(story.source)
    assert watch.is_due(0.0)


def test_a_run_that_cannot_be_shown_keeps_no_other_from_it(
    story: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named once."""
    monkeypatch.setattr(watching, "UPDATE_SECONDS", 0.0)
    poison, other = SignedManifest.create(Identity.generate(), "poison", {}), invented_run("other").manifest
    sources = NodeSources(NETWORK, None)
    for _ in range(2):
        assert [source.run.manifest for source in sources.current([poison, other])] == [other]
    assert caplog.text.count(poison.run_id) == 1


def test_a_run_whose_page_cannot_be_made_keeps_no_other_from_it(
    story: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = replace(story.source, run=invented_run("other"))

    class Watch(RunWatch):
        def __init__(self, source: Source) -> None:
            if source is story.source:
                raise KeyError("a mistake")
            super().__init__(source)

    monkeypatch.setattr("opendiloco.dashboard.watching.RunWatch", Watch)

    async def scenario() -> None:
        watched = RunWatches(lambda: [story.source, other])
        looking = asyncio.create_task(watched.keep_updating())
        async with asyncio.timeout(LIMIT):
            while not watched.runs:
                await asyncio.sleep(0.01)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        assert list(watched.runs) == [other.run.run_id]

    asyncio.run(scenario())
    assert caplog.text.count(f"run {story.run.run_id}: making its page failed") == 1


# Addresses ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 10_000 + b"\r\n", b"400"),
        (b"GET http://[::1/ HTTP/1.1\r\n\r\n", b"400"),
        (bytes(range(256)) * 20 + b"\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde", b"405"),
    ],
    ids=["a long header", "many headers", "no address", "binary", "no gzip"],
)
def test_strangers_write_nothing_into_the_log(caplog: pytest.LogCaptureFixture, asked: bytes, status: bytes) -> None:
    """Regression: each such request left a traceback."""

    async def scenario() -> None:
        listening = bind(("127.0.0.1", 0))
        async with asyncio.timeout(LIMIT), server.dashboard(listening, list):
            reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
            writer.write(asked)
            said = await reader.read()
            assert said.split()[1] == status
            writer.close()

    asyncio.run(scenario())
    assert not caplog.records


def test_it_listens_where_it_was_told_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with bind(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert url_of(listening) == f"http://127.0.0.1:{port}/"
        assert not caplog.records
        with pytest.raises(LocalNetworkError, match=f"127.0.0.1 port {port}"):
            bind(("127.0.0.1", port))
    with pytest.raises(OwnAddressError, match="no host port 0: Name or service not known"):
        bind(("no host", 0))
    with bind(("0.0.0.0", 0)):
        assert "has no password" in caplog.text


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::1]:0", ("::1", 0)), ("localhost:80", ("localhost", 80))],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize(
    "text", ["8080", "127.0.0.1", ":8080", "::1:8080", "localhost:70000", "localhost:http", "[::1]"]
)
def test_what_is_no_address_is_a_clear_error(text: str) -> None:
    done = CliRunner().invoke(main, ["bootstrap", "--identity", "key", "--dashboard", text])
    assert done.exit_code == 2
    assert "not HOST:PORT" in done.output


def test_a_volunteers_own_peer_is_marked_and_its_curve_is_left_to_its_trackers(story: Story) -> None:
    class Volunteer:
        run = story.run
        log = story.invented.log
        held_out = HeldOutCurve()

        def heartbeats(self) -> list[Heartbeat]:
            return [said(story.run, story.invented.end, PEERS[0], held_out=HeldOutLoss(index=2, loss=2.0))]

    volunteer = Volunteer()
    volunteer.held_out.add(0, 5.0)

    async def scenario() -> None:
        source = volunteer_source(volunteer, NETWORK)  # type: ignore[arg-type]
        async with serving(source) as client, client.get(f"/api/runs/{story.run.run_id}") as answer:
            shown = await answer.json()
        assert shown["run"]["me"] == PEERS[0]
        assert shown["losses"]["held_out"] == [[0, 5.0], [2, 2.0]]

    asyncio.run(scenario())
    assert volunteer.held_out.losses == {0: 5.0}, "regression: its trackers were never told of what the page had heard"
