"""What a machine knows of a run's archives when it begins, and where it keeps what it hears."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.storage.run_folder import RunFolder
from opendiloco.view.run_view import plain_signed, signed_lines
from opendiloco.volunteer import admission as module
from opendiloco.volunteer.admission import ask_for_signed_heads
from peers.network.channel import PeerUnreachableError
from peers.network.known_runs import KnownRuns
from peers.network.transport import HivemindTransport
from peers.values.identity import Identity
from peers.values.signed_heads import SignedHead

ORGANISER, NODE = Identity.generate(), Identity.generate()
ADDRESS = f"/ip4/192.0.2.2/tcp/31337/p2p/{NODE.peer_id}"


class Network:
    """A way to one node that remembers runs."""

    peer_id = "me"

    def __init__(self, node: KnownRuns | None = None) -> None:
        self.runs = KnownRuns()
        self.node = node
        self.is_silent = False

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.node is None:
            raise PeerUnreachableError(peer_id, "no answer in time")
        return await self.node.answer_heads(self.peer_id, payload)


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, ORGANISER)


def head(run: Run, index: int) -> SignedHead:
    return SignedHead.sign(run.run_id, index, bytes(32), ORGANISER.peer_id, ORGANISER)


def begin(network: Network, run: Run, folder: RunFolder | None = None) -> list[int]:
    network.runs.learn(run.manifest)
    asyncio.run(ask_for_signed_heads(cast(HivemindTransport, network), run, [ADDRESS], folder))
    return [one.index for one in network.runs.signed_heads_of(run.run_id).heads]


def test_nodes_that_remember_the_run_are_asked(run: Run) -> None:
    node = KnownRuns()
    node.learn(run.manifest)
    node.take_heads(run.run_id, [head(run, 3)])
    assert begin(Network(node), run) == [3]
    assert begin(Network(), run) == []


def test_what_was_heard_is_there_at_the_next_start(run: Run, tmp_path: Path) -> None:
    folder, network = RunFolder.open(run, "me", tmp_path), Network()
    assert begin(network, run, folder) == []
    network.runs.take_heads(run.run_id, [head(run, 3)])
    network.runs.take_heads(run.run_id, [head(run, 5)])
    assert begin(Network(), run, folder) == [3, 5]


def test_a_damaged_file_is_passed_over(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.open(run, "me", tmp_path)
    folder.signed_heads.write_bytes(b"garbage")
    assert begin(Network(), run, folder) == []
    assert "is ignored: they cannot be read" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_node_that_does_not_answer_is_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_LIMIT", 0.01)
    network = Network()
    network.is_silent = True
    assert begin(network, run) == []


def test_the_newest_in_words_and_as_json(run: Run) -> None:
    network = Network()
    network.runs.learn(run.manifest)
    known = network.runs.signed_heads_of(run.run_id)
    assert (signed_lines(known), plain_signed(known)) == ([], None)
    network.runs.take_heads(run.run_id, [head(run, 3), head(run, 5)])
    known = network.runs.signed_heads_of(run.run_id)
    assert signed_lines(known) == ["archives have signed outer step 5 (00000000)"]
    assert plain_signed(known) == {"outer_step": 5, "log_digest": "00" * 32}
