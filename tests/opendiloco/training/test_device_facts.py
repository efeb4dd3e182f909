"""The device that a worker trains on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opendiloco.config.run_config import RunConfig
from opendiloco.errors import MachineError
from opendiloco.stages import watched_by
from opendiloco.training.team import Team, choose_device, compiling_lacks
from opendiloco.workers.assembly import _is_compiled, in_fitting_precision
from opendiloco.workers.options import WorkerOptions


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(MachineError, match=r"--device cuda:63 cannot be used by torch .*\.$") as caught:
        choose_device("cuda:63")
    assert caught.value.exit_code == 6
    assert "cpu" in caught.value.remedy
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize("wanted", ["abacus", "meta", "cpu:0", "cuda:", "mps", ""])
def test_a_device_that_is_none_of_ours(wanted: str) -> None:
    with pytest.raises(MachineError, match=f"--device {wanted} is nothing to train on") as caught:
        choose_device(wanted)
    assert caught.value.exit_code == 6


def test_the_processor_can_always_be_had() -> None:
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in {"cpu", "cuda"}


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
    ("device", "capability", "asked", "computed"),
    [
        ("cuda:0", (9, 0), "bf16", "bf16"),
        ("cuda:0", (7, 5), "bf16", "fp32"),
        ("cuda:0", (7, 5), "fp32", "fp32"),
        ("cpu", (0, 0), "bf16", "bf16"),
    ],
)
def test_a_gpu_without_bf16_computes_in_fp32_and_says_so(
    device: str,
    capability: tuple[int, int],
    asked: str,
    computed: str,
    small_content: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    training = small_content["training"] | {"precision": asked}
    config, said = RunConfig.from_manifest_content(small_content | {"training": training}), list[str]()
    with watched_by(lambda stage, share: said.append(stage)):
        assert in_fitting_precision(config, Team(torch.device(device))).training.precision == computed
    assert bool(said) == (asked != computed)
    assert config.training.precision == asked
