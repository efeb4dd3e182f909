"""Commitments to contributions, and chunks that convict their owners (R3, R9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from peers.log.header import Position
from peers.messages.commitment import Author, Commitment, CommittedChunk, Contribution, commit_to
from peers.values.chunks import Sum
from peers.values.wire import WireError, digest_of, from_plain
from peers.values.workload import BadBlocksError, Blocks
from tests.peers.builders import CONTRIBUTION, SIZE, evidence, inspect
from tests.peers.logs import first_log
from tests.simulator.simulated_keys import SimulatedKeys

LOG = first_log()
VERIFY = SimulatedKeys("anybody").verify


def author(peer: str, incarnation: int = 0, at: Position = LOG.position, number: int = 2) -> Author:
    return Author(peer=peer, incarnation=incarnation, position=at, number=number)


def commitment(peer: str, incarnation: int = 0, root: Sum = CONTRIBUTION, number: int = 2) -> Commitment:
    return commit_to(root, author(peer, incarnation, number=number), SimulatedKeys(peer))


def convicts(shown: CommittedChunk, peer: str = "c", at: Position = LOG.position) -> bool:
    return shown.convicts(author(peer, at=at), SIZE.chunks, VERIFY, inspect)


def test_a_norm_that_is_not_the_committed_one_convicts() -> None:
    assert convicts(evidence(LOG, "c"))


def test_what_no_encoder_makes_convicts_whatever_norm_was_committed_to() -> None:
    def refuse(chunk: int, data: Blocks, format: int) -> float:
        raise BadBlocksError("code -128")

    shown = evidence(LOG, "c", honest=True)
    assert shown.convicts(author("c"), SIZE.chunks, VERIFY, refuse)


def test_what_was_honestly_committed_to_convicts_nobody() -> None:
    assert not convicts(evidence(LOG, "c", honest=True))


CHANGES: dict[str, Callable[[CommittedChunk], dict[str, Any]]] = {
    "other bytes": lambda shown: {"data": b"other"},
    "another chunk": lambda shown: {"chunk": 3},
    "no such chunk": lambda shown: {"chunk": SIZE.chunks},
    "another norm": lambda shown: {"proof": shown.proof.model_copy(update={"squares": 2.0})},
    "no way up": lambda shown: {"proof": shown.proof.model_copy(update={"path": b""})},
    "another root": lambda shown: {"commitment": commitment("c")},
    "not signed": lambda shown: {"commitment": shown.commitment.model_copy(update={"signature": bytes(64)})},
    "signed by another": lambda shown: {"commitment": commitment("b", root=shown.commitment.root)},
    "of another incarnation": lambda shown: {"commitment": commitment("c", 1, shown.commitment.root)},
    "of another training": lambda shown: {"commitment": commitment("c", 0, shown.commitment.root, 3)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_else_convicts(change: str) -> None:
    shown = evidence(LOG, "c")
    assert not convicts(shown.model_copy(update=CHANGES[change](shown)))


def test_it_convicts_nobody_else_and_nowhere_else() -> None:
    assert not convicts(evidence(LOG, "c"), peer="b")
    elsewhere = LOG.position.model_copy(update={"head": digest_of(b"another lineage")})
    assert not convicts(evidence(LOG, "c"), at=elsewhere)


def test_a_commitment_is_for_one_training_at_one_position_in_one_incarnation() -> None:
    said = commitment("c", 7, number=3)
    assert said.number == 3
    assert said.is_of(author("c", 7, number=3), VERIFY)
    another_fragment = LOG.position.model_copy(update={"fragment": 1})
    for other in (
        author("c", 8, number=3),
        author("b", 7, number=3),
        author("c", 7, number=4),
        author("c", 7, another_fragment, 3),
    ):
        assert not said.is_of(other, VERIFY)


@pytest.mark.parametrize("squares", [-1.0, float("nan"), float("inf"), True, "1", None])
def test_a_norm_is_a_finite_number(squares: object) -> None:
    with pytest.raises(WireError, match="squares"):
        from_plain(Contribution, [CONTRIBUTION.digest, squares, 0, 0])
