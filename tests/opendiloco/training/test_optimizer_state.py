"""An inner optimizer whose moments are in main memory, or in 8 bits a value, between two steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from opendiloco.config.run_config import RunConfig
from opendiloco.data.tokenizer import ByteTokenizer
from opendiloco.data.training_data import load_data
from opendiloco.errors import MachineError
from opendiloco.host_memory import QUANTIZED_BLOCK, QUANTIZED_BYTES, QUANTIZING_BYTES, HostMemory, WorkerMemory
from opendiloco.model.build import initial_theta
from opendiloco.quantities import OptimizerState
from opendiloco.shared_memory import Vector
from opendiloco.training import optimizers
from opendiloco.training.inner import ModelReplica
from opendiloco.training.optimizers import PAGE_VALUES, build_inner_optimizer, check_inner_optimizer
from opendiloco.training.team import Team
from opendiloco.training.trials import _taken_later, compiled_blocks, peak_while
from opendiloco.workers import assembly
from opendiloco.workers.assembly import _check_device, _check_memory, assemble_model
from opendiloco.workers.options import WorkerOptions
from peers.values.leases import SampleRange
from tests.opendiloco.storage.frozen_states import RUN
from tests.opendiloco.training.test_moments_file import NEXT, OF_TORCH, keep, with_optimizer
from tests.opendiloco.training.test_optimizers import section
from tests.opendiloco.workers.ranks import Ranks
from tests.opendiloco.workers.test_sharing_workers import pair

CPU = torch.device("cpu")
LEASE = (SampleRange(0, 12),)
KEPT: tuple[OptimizerState, ...] = get_args(OptimizerState)
PACKED = KEPT[1:]
STREAMING = {"layers_per_fragment": 1, "overlap": 1, "alpha": 0.5}


@pytest.fixture
def _has_torchao() -> None:
    pytest.importorskip("torchao")


def replica_of(
    config: RunConfig, kept: OptimizerState = "device", half: torch.dtype = torch.bfloat16, **options: Any
) -> ModelReplica:
    team = Team(CPU)
    team.half = half
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(**options), None)
    samples = load_data(config, ByteTokenizer()).samples
    return ModelReplica(config, model, samples, team, micro_batch=1, optimizer_state=kept)


def trained(replica: ModelReplica, theta: Vector, lease: tuple[SampleRange, ...] = LEASE, index: int = 0) -> Vector:
    replica.train(theta, index, lease, 6)
    local = np.zeros_like(theta)
    replica.store(local)
    return local


def distance(found: Vector, expected: Vector, theta: Vector) -> float:
    """Return how far apart two are that have begun with theta, as a share of the way."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected - theta))


def changed(content: dict[str, Any], model: Mapping[str, Any] | None = None, **tables: Mapping[str, Any]) -> RunConfig:
    """The small run with other values in some tables."""
    config = content["model"]["config"] | dict(model or {})
    merged = {name: content.get(name, {}) | dict(values) for name, values in tables.items()}
    return RunConfig.from_manifest_content(content | {"model": {"config": config, "init_seed": 3}} | merged)


# In main memory -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", OF_TORCH, ids=lambda values: values.get("name", values["kind"]))
def test_steps_from_main_memory_have_the_bits_of_any_other_whichever_the_optimizer(
    small_content: dict[str, Any], tmp_path: Path, values: dict[str, Any]
) -> None:
    """Also after the way through a file, to a session that keeps them elsewhere."""
    config = with_optimizer(small_content, values)
    ours, plain = replica_of(config, "host"), replica_of(config)
    theta = initial_theta(config)
    assert np.array_equal(trained(ours, theta), trained(plain, theta))
    (tmp_path / "plain").mkdir()
    files = keep(ours, tmp_path), keep(plain, tmp_path / "plain")
    assert files[0].read_bytes() == files[1].read_bytes()
    again, ours_again = replica_of(config), replica_of(config, "host")
    again.recall_moments(files[0], RUN)
    ours_again.recall_moments(files[1], RUN)
    expected = trained(plain, theta, NEXT, 6)
    for each in (again, ours_again):
        assert np.array_equal(trained(each, theta, NEXT, 6), expected)
    assert not np.array_equal(trained(replica_of(config, "host"), theta, NEXT, 6), expected)


TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16, checkpointed, streaming": (
        {"training": {"precision": "bf16"}, "streaming": STREAMING, "model": {"num_hidden_layers": 2}},
        {"activation_checkpointing": True},
    ),
    "fp16, compiled": ({"training": {"precision": "bf16"}}, {"half": torch.float16, "compile": True}),
}


@pytest.mark.parametrize("how", TRAININGS)
@pytest.mark.parametrize("kept", PACKED)
def test_it_goes_with_however_else_a_machine_trains(
    small_content: dict[str, Any], how: str, kept: OptimizerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit from main memory; and nearly in 8 bits, which a model as small as this has too few values for."""
    if kept == "8bit":
        pytest.importorskip("torchao")
        monkeypatch.setattr(optimizers, "LEAST_QUANTIZED", 256)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # that needs no C compiler
    tables, options = TRAININGS[how]
    config = changed(small_content, **tables)
    ours, plain = replica_of(config, kept, **options), replica_of(config, **options)
    assert bool(compiled_blocks(ours.model)) == options.get("compile", False)
    theta = initial_theta(config)
    found, expected = (trained(each, theta) for each in (ours, plain))
    difference = distance(found, expected, theta)
    assert difference == 0 if kept == "host" else 0 < difference < 0.1


SHARED = """
from opendiloco.training import optimizers
from opendiloco.training.optimizers import kept_state
import numpy as np
optimizers.LEAST_QUANTIZED = 256

def trained(kept):
    model = assemble_model(config, ByteTokenizer(), team, WorkerOptions(), None)
    made = ModelReplica(config, model, samples, team, 1, optimizer_state=kept)
    made.train(theta, 0, (SampleRange(0, 8),), 2)
    made.keep_moments(folder / kept, "run", 1)()
    team.wait_for_all()
    again = ModelReplica(config, model, samples, team, 1, optimizer_state=kept)
    again.recall_moments(folder / kept, "run")
    again.train(theta, 1, (SampleRange(8, 16),), 2)
    local = np.zeros_like(theta)
    again.store(local)
    return local

plain = trained("device")
end([float(np.linalg.norm(trained(kept) - plain) / np.linalg.norm(plain - theta)) for kept in KEPT])
"""


@pytest.mark.thorough
def test_two_workers_that_share_a_model_keep_their_own_rows(small_content: dict[str, Any], tmp_path: Path) -> None:
    """And go on with what they have kept in a file."""
    content = small_content | {"training": small_content["training"] | {"batch_size": 4}}
    with Ranks() as ranks:
        found = pair(ranks, tmp_path, content, "KEPT = ['host']" + SHARED)
        assert found == [[0], [0]]
        assert (tmp_path / "host").read_bytes() == (tmp_path / "device").read_bytes()
        pytest.importorskip("torchao")
        (tmp_path / "again").mkdir()
        for [difference] in pair(ranks, tmp_path / "again", content, "KEPT = ['8bit']" + SHARED):
            assert 0 < difference < 0.1


@pytest.mark.parametrize("count", [0, 1, 5, PAGE_VALUES - 1, PAGE_VALUES, 32_000 * 2048, 5632 * 2048 + 7])
def test_pinned_memory_is_asked_for_in_sizes_that_torch_does_not_round_up(count: int) -> None:
    *sizes, last = *optimizers._powers_of_two(count), 0
    assert sum(sizes) + last == count
    sizes = [size for size in sizes if size >= PAGE_VALUES]
    assert all(size.bit_count() == 1 for size in sizes)
    assert count - sum(sizes) < PAGE_VALUES


def test_beside_a_gpu_main_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    class OnGpu:
        """A tensor as far as it says where it is, and how large."""

        shape, device = torch.Size([PAGE_VALUES + 3]), torch.device("cuda")

        def numel(self) -> int:
            return PAGE_VALUES + 3

    def empty(size: int, pin_memory: bool) -> torch.Tensor:
        asked.append((size, pin_memory))
        return torch.zeros(size)

    monkeypatch.setattr(torch, "empty", empty)
    optimizers._Packed.like(OnGpu(), "host", is_signed=True)  # type: ignore[arg-type]
    assert asked == [(PAGE_VALUES, True), (3, True)]


# In 8 bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("_has_torchao")
def test_a_step_in_8_bits_is_torchaos_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of fp32's roundings: a moment may fall to the code beside."""
    from torchao.optim import AdamW8bit

    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(96, 64), torch.nn.Linear(96, 64)
    theirs.load_state_dict(before := copy.deepcopy(ours.state_dict()))
    own = build_inner_optimizer(ours, section(kind="adamw", weight_decay=0.1), "8bit")
    other = AdamW8bit(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    with torch.compiler.set_stance("force_eager"):
        for inputs in torch.randn(20, 32, 96):
            for model, optimizer in ((ours, own), (theirs, other)):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
    found, expected, first = (each["weight"].numpy() for each in (ours.state_dict(), theirs.state_dict(), before))
    assert distance(found, expected, first) < 1e-3
    packed = own.state[ours.weight]["exp_avg"]
    assert sum(piece.codes.nbytes + piece.scale.nbytes for piece in packed.pieces[:-1]) == 96 * 64 * (1 + 4 / 256)


@pytest.mark.usefixtures("_has_torchao")
def test_moments_in_8_bits_lie_in_files_in_fp32_and_are_read_by_any_session(
    small_content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "LEAST_QUANTIZED", 256)
    monkeypatch.setattr(optimizers, "QUANTIZED_AT_ONCE", 1024)
    config = changed(small_content)
    replicas = {kept: replica_of(config, kept) for kept in KEPT}
    theta = initial_theta(config)
    for each in replicas.values():
        trained(each, theta)
    files = dict[str, Path]()
    for kept, each in replicas.items():
        (tmp_path / kept).mkdir()
        files[kept] = keep(each, tmp_path / kept)
    exact, rounded = load_file(files["device"]), load_file(files["8bit"])
    assert exact.keys() == rounded.keys()
    for name, values in exact.items():
        assert np.abs(rounded[name] - values).max() <= 0.05 * np.abs(values).max(), name
    for kept in KEPT:  # each goes on with the others' files, and nearly alike
        found = []
        for file in files.values():
            again = replica_of(config, kept)
            again.recall_moments(file, RUN)
            found.append(trained(again, theta, NEXT, 6))
        assert distance(found[2], found[0], theta) < 0.1


@pytest.mark.usefixtures("_has_torchao")
@pytest.mark.parametrize("is_signed", [False, True])
def test_what_quantizing_takes_is_what_the_formula_says(is_signed: bool) -> None:
    """Of what torchao does to a moment nothing else sees the memory."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

    values = torch.rand(1 << 16)
    pieces: Any = optimizers._Packed.like(values, "8bit", is_signed).pieces
    piece, rest = pieces
    assert len(rest) == 0
    taken = peak_while(lambda: quantize_8bit_with_qmap(scale_tensor(values, QUANTIZED_BLOCK)[0], piece.qmap), CPU)
    assert taken == pytest.approx(QUANTIZING_BYTES * len(values), rel=0.05)


# Room -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kept", "on_gpu"), [("device", 8.0), ("host", 0.0), ("8bit", QUANTIZED_BYTES)])
def test_windows_have_what_moments_leave(small_config: RunConfig, kept: OptimizerState, on_gpu: float) -> None:
    """On the CPU they share main memory with moments that are in it."""
    if kept == "8bit":
        pytest.importorskip("torchao")
    replica = replica_of(small_config, kept)
    size, host = replica.layout.size, HostMemory.of(replica.layout.size, small_config.codec)
    assert _taken_later(replica, Team(torch.device("cuda")), trains=True) == int(on_gpu * size)
    main = host.most - host.shared + int((on_gpu or 8) * size)
    assert _taken_later(replica, Team(CPU), trains=True) == main
    assert _taken_later(replica, Team(torch.device("cuda")), trains=False) == 0


def test_what_a_gpu_has_left_is_found_before_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200, 300))
    gpu = Team(torch.device("cuda", 0))
    assert _check_device(WorkerMemory(10, 10, is_fused=True), gpu, trains=True) == 40
    assert _check_device(WorkerMemory(10, 10, is_fused=True, optimizer_state="host"), gpu, trains=True) == 120
    with pytest.raises(MachineError, match=r"cuda:0 has 0 MiB free; .* try --optimizer-state host or 8bit"):
        _check_device(WorkerMemory(20, 20, is_fused=True), gpu, trains=True)


@pytest.mark.parametrize("kept", ["device", "host"])
def test_main_memory_is_checked_for_the_moments_of_each_replica(
    small_config: RunConfig, kept: OptimizerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(assembly, "check_available", lambda what, needed: asked.append(needed))
    team = Team(torch.device("cuda"), size=4)
    team.shards = 2
    memory = WorkerMemory(10**9, 10**9, optimizer_state=kept)
    _check_memory(memory, team, True, small_config.codec)
    assert asked == [HostMemory.of(10**9, small_config.codec).most + 2 * 8 * 10**9 * (kept == "host")]


# What is refused ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", [value for value in OF_TORCH if value.get("name", value["kind"]).lower() != "adamw"])
def test_only_adamws_moments_are_kept_in_8_bits(values: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match=r"^--optimizer-state 8bit: only AdamW's .* Use --optimizer-state host"):
        check_inner_optimizer(section(**values), "8bit")


def test_without_torchao_it_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MachineError, match=r"torchao cannot be imported: .* pip install torchao"):
        check_inner_optimizer(section(kind="adamw"), "8bit")
