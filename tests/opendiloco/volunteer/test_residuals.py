"""Error feedback: what payloads leave out is made up for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.run_config import CodecSection, RunConfig
from opendiloco.host_memory import HostMemory
from opendiloco.training import codec
from opendiloco.training.codec import Residual
from opendiloco.volunteer.local_workload import LocalWorkload
from peers.errors import ManifestError
from peers.transfer.storage import MemoryFile
from tests.opendiloco.volunteer.threaded_workers import ThreadedWorkers


def test_a_share_of_what_was_left_out_comes_back() -> None:
    residual = Residual(CodecSection(error_feedback=0.5), 3)
    left_out = residual.to_add()
    assert left_out is not None
    assert left_out.tolist() == [0, 0, 0]
    left_out[:] = (1, 2, 4)
    assert residual.to_add() is left_out
    assert left_out.tolist() == [0.5, 1, 2]
    residual.forget()
    assert left_out.tolist() == [0, 0, 0]


def test_what_no_entry_has_answered_is_forgotten_when_training_begins_anew() -> None:
    residual = Residual(CodecSection(error_feedback=1.0), 4096 + 64)
    left_out = residual.to_add()
    assert left_out is not None
    left_out[:] = 1
    residual.take_back(sparse({}), sparse({}))
    residual.forget_unanswered()
    assert left_out.all(), "it was answered"
    residual.to_add()
    residual.forget_unanswered()
    assert not left_out.any()


def test_without_it_there_is_none_and_it_takes_no_memory() -> None:
    residual = Residual(CodecSection(), 3)
    residual.forget()
    assert residual.to_add() is None


SHARED, OURS, NOBODYS = 5, 4090, 4100  # of 4096 + 64 values: each in the payload or not


def sparse(values: dict[int, float]) -> kernels.Payload:
    vector = np.zeros(4096 + 64, np.float32)
    for place, value in values.items():
        vector[place] = value
    payload = kernels.Payload(kernels.SPARSE, vector.size)
    kernels.quantize(vector, payload)
    return payload


def test_what_a_sparse_average_left_out_is_taken_back() -> None:
    feedback = Residual(CodecSection(error_feedback=0.5), 4096 + 64)
    residual = feedback.to_add()
    assert residual is not None
    residual[SHARED] = 3
    own, average = sparse({SHARED: 2, OURS: -1, 4099: 2}), sparse({SHARED: 1, NOBODYS: 1})
    feedback.take_back(own, average)
    assert {int(place): float(residual[place]) for place in np.flatnonzero(residual)} == {SHARED: 3, OURS: -1, 4099: 2}
    feedback.take_back(own, average)
    assert residual[OURS] == -1, "each payload is in one average"
    feedback.to_add()
    feedback.forget()
    feedback.take_back(own, average)
    assert not residual.any(), "an average without our payload took nothing of it"


def test_what_all_take_back_is_what_the_average_lost() -> None:
    """But for the rounding of what it kept."""
    draw, size, members = np.random.default_rng(3), 3 * 4096 + 700, 3
    residuals = [Residual(CodecSection(error_feedback=1.0), size) for _ in range(members)]
    payloads, average = (
        [kernels.Payload(kernels.SPARSE, size) for _ in range(members)],
        kernels.Payload(kernels.SPARSE, size),
    )
    total, sent = np.zeros(size, np.float64), np.zeros((members, size), np.float32)
    for own, payload, values in zip(residuals, payloads, sent, strict=True):
        difference = draw.standard_normal(size).astype(np.float32)
        kernels.quantize_difference(difference, np.zeros_like(difference), payload, residual=own.to_add())
        kernels.dequantize(payload, values)
        total += difference
    kernels.average([(payload, 1.0) for payload in payloads], average)
    applied = np.zeros(size, np.float32)
    kernels.dequantize(average, applied)
    kept = applied != 0
    for own, payload in zip(residuals, payloads, strict=True):
        own.take_back(payload, average)
    left = sum(vector.astype(np.float64) for own in residuals if (vector := own.to_add()) is not None)
    np.testing.assert_allclose((left + members * applied)[~kept], total[~kept], atol=1e-5)
    assert kept.sum() < (sent != 0).any(axis=0).sum()


def config_with(small_content: dict[str, Any], **codec: Any) -> RunConfig:
    return RunConfig.from_manifest_content(small_content | {"codec": {"kind": "e3m0"} | codec})


def test_a_sparse_run_has_error_feedback_unless_it_says_how_much(small_content: dict[str, Any]) -> None:
    assert config_with(small_content, kind="sparse").codec.error_feedback == 0.95
    assert config_with(small_content, kind="sparse", error_feedback=0.5).codec.error_feedback == 0.5
    assert config_with(small_content).codec.error_feedback == 0
    with pytest.raises(ManifestError, match=r"63 of 64 values.* remove error_feedback, whose default is 0\.95"):
        config_with(small_content, kind="sparse", error_feedback=0.0)


def test_it_takes_four_bytes_a_parameter(small_content: dict[str, Any]) -> None:
    without, feedback = config_with(small_content), config_with(small_content, error_feedback=0.5)
    more = HostMemory.of(1000, feedback.codec).most - HostMemory.of(1000, without.codec).most
    assert more == 4 * 1000


def told(workload: LocalWorkload, counts: bool) -> tuple[bytes, bytes]:
    """Return two contributions of the same difference; the first is in the average or not."""

    async def story() -> tuple[bytes, bytes]:
        vectors = workload.trainer.vectors
        difference = np.random.default_rng(0).standard_normal(vectors.theta.size).astype(np.float32)
        contributions = []
        for _ in range(2):
            vectors.local[:] = vectors.theta - difference
            contributions.append(bytes(await workload.contribution()))
            nothing = kernels.Payload(kernels.E3M0, difference.size)
            kernels.quantize(np.zeros_like(difference), nothing)
            await workload.apply(bytes(nothing.buffer), 0, counts=counts)
        return contributions[0], contributions[1]

    return asyncio.run(story())


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("counts", [True, False])
def test_what_did_not_count_is_not_made_up_for(small_content: dict[str, Any], share: float, counts: bool) -> None:
    async def made() -> LocalWorkload:
        config = config_with(small_content, error_feedback=share)
        return LocalWorkload(ThreadedWorkers(config), config)

    first, second = told(asyncio.run(made()), counts)
    assert (first != second) == (share > 0 and counts)


def test_what_a_fragment_left_out_is_in_the_payloads_that_follow(small_content: dict[str, Any]) -> None:
    """Four bits round small values to zero for ever; with feedback they come through on average."""
    theta, local = np.zeros(1024, np.float32), np.full(1024, -0.004, np.float32)
    local[0] = -1.0
    sent = np.zeros((200, 1024), np.float32)
    residual = np.zeros(1024, np.float32)
    for row in sent:
        payload = kernels.Payload(kernels.E3M0, 1024)
        kernels.quantize_difference(theta, local, payload, residual=residual)
        kernels.dequantize(payload, row)
    assert sent[:, 1:].mean() == pytest.approx(0.004, rel=0.05)


def test_what_a_thin_payload_left_out_is_made_up_for_in_any_format(tmp_path: Path) -> None:
    """Once: what the run's own format leaves out is not, in a run without error feedback."""
    residual = Residual(CodecSection(), 4)
    assert residual.to_add() is None
    left_out = residual.to_add(2, tmp_path)
    assert left_out is not None
    left_out[:] = 1
    again = residual.to_add(0)
    assert again is not None
    assert again.tolist() == pytest.approx([0.95] * 4)
    again[:] = 0.01
    assert residual.to_add(0) is None


def test_of_many_values_it_lies_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "IN_MEMORY", 1000)
    files = list[Path]()

    def on_disk(size: int, folder: Path) -> MemoryFile:
        files.append(folder)
        return MemoryFile.in_memory(size)

    monkeypatch.setattr(MemoryFile, "on_disk", on_disk)
    vector = Residual(CodecSection(), 500).to_add(1, tmp_path)
    assert vector is not None
    assert vector.tolist() == [0.0] * 500
    assert files == [tmp_path]
    vector += 1

    def is_full(size: int, folder: Path) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr(MemoryFile, "on_disk", is_full)
    vector = Residual(CodecSection(), 500).to_add(1, tmp_path)
    assert vector is not None, "it is in memory then"
    assert vector.size == 500
