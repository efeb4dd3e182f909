"""What a machine knows of a run's anchors when it begins, and where it keeps what it hears."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import cast

import pytest

from opendiloco import anchorage as module
from opendiloco.anchorage import anchor_lines, ask_for_anchors
from opendiloco.checkpoints.run_folder import RunFolder
from opendiloco.cli.status import plain_anchors
from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from peers.net.anchorage import Anchorage
from peers.net.transport import HivemindTransport
from peers.streams.channel import PeerUnreachableError
from peers.values.anchors import AnchoredHead, AnchoredHeads
from peers.values.identity import Identity
from peers.values.signing import IdentityKeys
from peers.values.wire import pack

ORGANISER, NODE = Identity.generate(), Identity.generate()
ADDRESS = f"/ip4/192.0.2.2/tcp/31337/p2p/{NODE.peer_id}"


class Network:
    """A way to one node that remembers runs."""

    peer_id = "me"

    def __init__(self, node: Anchorage | None = None) -> None:
        self.anchorage = Anchorage()
        self.node = node
        self.is_silent = False

    async def call(self, peer_id: str, name: str, payload: bytes, timeout: float) -> bytes:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.node is None:
            raise PeerUnreachableError(peer_id, "no answer in time")
        return await self.node.answer(self.peer_id, payload)


@pytest.fixture
def run(small_config: RunConfig) -> Run:
    return Run.sign(small_config, ORGANISER)


def head(run: Run, index: int) -> bytes:
    signed = AnchoredHead.sign(run.run_id, index, bytes(32), ORGANISER.peer_id, IdentityKeys(ORGANISER))
    return pack(AnchoredHeads(heads=(signed,)))


def begin(network: Network, run: Run, folder: RunFolder | None = None) -> list[int]:
    asyncio.run(ask_for_anchors(cast(HivemindTransport, network), run, [ADDRESS], folder))
    return [one.index for one in network.anchorage.of(run.run_id).heads]


def test_nodes_that_remember_the_run_are_asked(run: Run) -> None:
    node = Anchorage()
    node.learn(run.manifest)
    node.take(run.run_id, head(run, 3))
    assert begin(Network(node), run) == [3]
    assert begin(Network(), run) == []


def test_what_was_heard_is_there_at_the_next_start(run: Run, tmp_path: Path) -> None:
    folder, network = RunFolder.open(run, "me", tmp_path), Network()
    assert begin(network, run, folder) == []
    network.anchorage.take(run.run_id, head(run, 3))
    network.anchorage.take(run.run_id, head(run, 5))
    assert begin(Network(), run, folder) == [3, 5]


def test_a_damaged_file_is_passed_over(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.open(run, "me", tmp_path)
    folder.anchors.write_bytes(b"garbage")
    assert begin(Network(), run, folder) == []
    assert "is passed over: they cannot be read" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_a_node_that_does_not_answer_is_not_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_LIMIT", 0.01)
    network = Network()
    network.is_silent = True
    assert begin(network, run) == []


def test_anchors_in_words_and_as_json(run: Run) -> None:
    other = AnchoredHead.sign(run.run_id, 5, b"x" * 32, ORGANISER.peer_id, IdentityKeys(ORGANISER))
    network, tail = Network(), ORGANISER.peer_id[-8:]
    network.anchorage.learn(run.manifest)
    assert anchor_lines(network.anchorage.of(run.run_id)) == []
    network.anchorage.take(run.run_id, head(run, 3))
    known = network.anchorage.of(run.run_id)
    assert anchor_lines(known) == [f"anchor …{tail} has signed outer step 3 (00000000)"]
    assert plain_anchors(known) == [{"anchor": ORGANISER.peer_id, "outer_step": 3, "log_digest": "00" * 32}]
    network.anchorage.take(run.run_id, head(run, 5))
    lied = network.anchorage.of(run.run_id).with_heads([other])
    assert anchor_lines(lied) == [
        f"anchor …{tail} has signed outer step 3 (00000000), and HAS SIGNED TWO LOGS and is not believed from outer "
        "step 5 on"
    ]
