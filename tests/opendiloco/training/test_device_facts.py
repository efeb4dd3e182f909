"""The device that a worker trains on."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import MachineError
from opendiloco.gpus import Cards
from opendiloco.stages import watched_by
from opendiloco.training.team import Team, choose_device, compiling_lacks
from opendiloco.workers.assembly import _is_compiled, in_fitting_precision
from opendiloco.workers.options import WorkerOptions
from opendiloco.workers.worker import CACHE_VARIABLE, _count_devices, _own_cache


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(MachineError, match=r"--device cuda:63 cannot be used by torch .*\.$") as caught:
        choose_device("cuda:63")
    assert caught.value.exit_code == 6
    assert "cpu" in caught.value.remedy
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize("wanted", ["abacus", "meta", "cpu:0", "cuda:", "mps", ""])
def test_a_device_that_is_none_of_ours(wanted: str) -> None:
    with pytest.raises(MachineError, match=f"--device {wanted} is not a device") as caught:
        choose_device(wanted)
    assert caught.value.exit_code == 6


def test_the_processor_can_always_be_had() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in {"cpu", "cuda"}


class WithoutKernels:
    """A card that torch sees, and has no kernels for."""

    name, major, minor = "Tesla P100-PCIE-16GB", 6, 0


def refuse(*size: object, **options: object) -> torch.Tensor:
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might")


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "auto"])
def test_a_gpu_that_is_too_old_for_this_torch(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: WithoutKernels)
    with pytest.raises(MachineError) as caught:
        choose_device(wanted)
    card = "Tesla P100-PCIE-16GB (compute capability 6.0)"
    assert caught.value.message.startswith(f"torch {torch.__version__} cannot compute on {card}: CUDA error: no kernel")
    assert "the build for CUDA 12.6" in caught.value.remedy
    assert "--device cpu" in caught.value.remedy


def test_a_gpu_whose_driver_is_too_old_for_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.device_count` counts it, and its first use fails."""

    def is_available() -> bool:
        warnings.warn("driver too old. Update", stacklevel=1)
        return False

    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("opendiloco.training.team.read_cards", lambda: Cards(("T4",), "550.1", is_driven=True))
    with pytest.raises(MachineError, match=r"T4 is here with driver 550.1.*cannot use it: driver too old\.") as caught:
        choose_device("cuda:0")
    assert "to 580 or newer" in caught.value.remedy


def test_the_worker_says_what_hides_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _count_devices().problem == "", "this machine"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("opendiloco.workers.worker.read_cards", lambda: Cards(("T4",), "550.1", is_driven=True))
    counted = _count_devices()
    assert (counted.gpus, "T4 is here with driver 550.1" in counted.problem) == (0, True)
    assert "--device cpu" in counted.remedy


@pytest.mark.parametrize(
    ("capability", "compilers", "lacking"),
    [
        ((8, 0), {"gcc"}, None),
        ((7, 0), {"clang"}, None),
        ((8, 0), {"my-cc"}, None),
        ((6, 1), {"gcc"}, "a Pascal is too old for it"),
        ((9, 0), set[str](), "there is no C compiler here; install gcc"),
    ],
)
def test_a_gpu_without_what_compiling_takes_trains_all_the_same(
    capability: tuple[int, int], compilers: set[str], lacking: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "my-cc")
    monkeypatch.setattr("shutil.which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pascal")
    gpu, said = torch.device("cuda:0"), list[str]()
    assert compiling_lacks(gpu) == lacking
    with watched_by(lambda stage, share: said.append(stage)):
        assert _is_compiled(WorkerOptions(), gpu) is (lacking is None)
        assert _is_compiled(WorkerOptions(compile=True), gpu)
    assert said == ([f"not compiling, which would be faster: {lacking}"] if lacking else [])
    assert not _is_compiled(WorkerOptions(), torch.device("cpu"))
    assert not _is_compiled(WorkerOptions(trains=False), gpu)


@pytest.mark.parametrize(
    ("device", "capability", "asked", "computed", "half"),
    [
        ("cuda:0", (9, 0), "bf16", "bf16", torch.bfloat16),
        ("cuda:0", (7, 5), "bf16", "bf16", torch.float16),
        ("cuda:0", (6, 1), "bf16", "fp32", torch.bfloat16),
        ("cuda:0", (7, 5), "fp32", "fp32", torch.bfloat16),
        ("cpu", (0, 0), "bf16", "bf16", torch.bfloat16),
    ],
)
def test_a_gpu_without_bf16_computes_in_fp16_if_that_is_fast_else_in_fp32_and_says_so(
    device: str,
    capability: tuple[int, int],
    asked: str,
    computed: str,
    half: torch.dtype,
    small_content: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    training, team = small_content["training"] | {"precision": asked}, Team(torch.device(device))
    config, said = RunConfig.from_manifest_content(small_content | {"training": training}), list[str]()
    with watched_by(lambda stage, share: said.append(stage)):
        assert in_fitting_precision(config, team).training.precision == computed
    assert team.half == half
    assert bool(said) == (asked != computed or half != torch.bfloat16)
    assert config.training.precision == asked


def test_what_is_compiled_is_kept_in_a_private_folder_unless_the_owner_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")  # as it is set by us, it is put back
    assert _own_cache(None) is None
    assert _own_cache(str(tmp_path / "state" / "compiled")) == tmp_path / "state" / "compiled"
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "state" / "compiled")
    assert (tmp_path / "state" / "compiled").stat().st_mode & 0o777 == 0o700
    assert _own_cache(str(tmp_path / "another")) is None, "the owner's"
    assert not (tmp_path / "another").exists()
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert _own_cache("/proc/nowhere") is None, "PyTorch chooses one"
