"""What a member commits to, and what shows that it did not keep to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from peers.log.header import Position
from peers.protocol.commitment import Commitment, Evidence
from peers.values.wire import digest_of
from peers.values.workload import BadBlocksError, Blocks
from tests.peers.builders import SIZE, attempt, author, commitment, evidence, first_log, inspect
from tests.simulator.simulated_keys import SimulatedKeys

LOG = first_log()
VERIFY = SimulatedKeys("anybody").verify


def convicts(shown: Evidence, peer: str = "c", at: Position = LOG.position) -> bool:
    return shown.convicts(author(peer, 0, at), SIZE.chunks, VERIFY, inspect)


def test_a_norm_that_is_not_the_committed_one_convicts() -> None:
    assert convicts(evidence(LOG, "c"))


def test_what_no_encoder_makes_convicts_whatever_norm_was_committed_to() -> None:
    def refuse(chunk: int, data: Blocks) -> float:
        raise BadBlocksError("code -128")

    shown = evidence(LOG, "c", honest=True)
    assert shown.convicts(author("c", 0, LOG.position), SIZE.chunks, VERIFY, refuse)


def test_what_was_honestly_committed_to_convicts_nobody() -> None:
    assert not convicts(evidence(LOG, "c", honest=True))


CHANGES: dict[str, Callable[[Evidence], dict[str, Any]]] = {
    "other bytes": lambda shown: {"data": b"other"},
    "another chunk": lambda shown: {"chunk": 3},
    "no such chunk": lambda shown: {"chunk": SIZE.chunks},
    "another norm": lambda shown: {"proof": shown.proof.model_copy(update={"squares": 2.0})},
    "no way up": lambda shown: {"proof": shown.proof.model_copy(update={"path": b""})},
    "another root": lambda shown: {"commitment": commitment("c", 0, LOG.position)},
    "not signed": lambda shown: {"commitment": shown.commitment.model_copy(update={"signature": bytes(64)})},
    "signed by another": lambda shown: {"commitment": commitment("b", 0, LOG.position, shown.commitment.root)},
    "of another start": lambda shown: {"commitment": commitment("c", 1, LOG.position, shown.commitment.root)},
    "for another round": lambda shown: {"commitment": commitment("c", 0, LOG.position, shown.commitment.root, 2)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_else_convicts(change: str) -> None:
    shown = evidence(LOG, "c")
    assert not convicts(shown.model_copy(update=CHANGES[change](shown)))


def test_it_convicts_nobody_else_and_nowhere_else() -> None:
    assert not convicts(evidence(LOG, "c"), peer="b")
    elsewhere = LOG.position.model_copy(update={"head": digest_of(b"another lineage")})
    assert not convicts(evidence(LOG, "c"), at=elsewhere)


def test_a_commitment_is_for_one_round_of_one_entry_and_one_start() -> None:
    said: Commitment = commitment("c", 7, LOG.position, after=3)
    assert said.is_of(author("c", 7, LOG.position, 3), VERIFY)
    assert not said.is_of(author("c", 8, LOG.position, 3), VERIFY)
    assert not said.is_of(author("b", 7, LOG.position, 3), VERIFY)
    assert not said.is_of(author("c", 7, LOG.position, 4), VERIFY)
    assert not said.is_of(author("c", 7, attempt(LOG).position.model_copy(update={"fragment": 1}), 3), VERIFY)
