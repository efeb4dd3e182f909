"""The choice of an instruction set, and threads that live for a call."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.errors import MachineError
from tests.opendiloco.kernels.vectors import encode, normal


def chosen_with(name: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}from opendiloco import kernels; print(kernels.chosen_kernels())"
    environment = {**os.environ, "DILOCO_KERNELS": name}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)


def test_a_checkout_in_which_the_kernels_are_not_built_names_the_remedy() -> None:
    """Regression: a program started in a checkout ended with ModuleNotFoundError alone."""
    done = chosen_with("", before="import sys; sys.modules['opendiloco._kernels'] = None; ")
    assert f"the C kernels are not built in {Path(__file__).parents[3]}: " in done.stderr
    assert "Run `make venv` there and use .venv/bin/python" in done.stderr


def test_all_that_the_processor_has_is_there() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = ["scalar"]
    if platform.machine() == "x86_64":
        expected += ["avx2"] if "avx2" in flags else []
        expected += ["avx512"] if flags >= {"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"} else []
    elif platform.machine() == "aarch64":
        expected += ["neon"]
    assert kernels.supported_kernels() == tuple(expected)


def test_the_fastest_is_the_default() -> None:
    kernels.choose_kernels("")
    assert kernels.chosen_kernels() == kernels.supported_kernels()[-1]


@pytest.mark.parametrize("name", kernels.supported_kernels())
def test_the_environment_forces_a_set(name: str) -> None:
    assert chosen_with(name).stdout.strip() == name


@pytest.mark.parametrize(("name", "cause"), [("mmx", "there is no such set"), ("neon", "does not have it")])
def test_a_set_that_is_not_there_is_a_clear_error(name: str, cause: str) -> None:
    if name in kernels.supported_kernels():
        pytest.skip(f"this machine has {name}")
    with pytest.raises(MachineError, match=cause) as raised:
        kernels.choose_kernels(name)
    assert f"DILOCO_KERNELS = '{name}'" in raised.value.message
    assert "scalar" in raised.value.remedy
    assert f"DILOCO_KERNELS = '{name}'" in chosen_with(name).stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_threads_work_after_a_fork() -> None:
    values = normal(300_000)
    payload = kernels.Payload(kernels.INT8, values.size)
    kernels.quantize(values, payload, threads=2)
    # Another program, because pytest's own process may have threads of other libraries.
    code = (
        "import os, numpy as np; from opendiloco import kernels as k\n"
        "values = np.arange(300000, dtype=np.float32); a, b = (k.Payload(k.INT8, values.size) for _ in 'ab')\n"
        "k.quantize(values, a, threads=2)\n"
        "child = os.fork()\n"
        "k.quantize(values, b, threads=2)\n"
        "same = bytes(a) == bytes(b)\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "raise SystemExit(os.waitpid(child, 0)[1] or not same)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0


def test_no_thread_outlives_a_call() -> None:
    before = len(os.listdir("/proc/self/task"))
    for threads in (2, 7, 64, 1000):
        payload = kernels.Payload(kernels.INT8, 700_000)
        kernels.quantize(np.ones(700_000, np.float32), payload, threads=threads)
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.parametrize("threads", [-1, 0, 1])
def test_fewer_than_one_thread_is_one(threads: int) -> None:
    payload = kernels.Payload(kernels.INT8, 100_000)
    kernels.quantize(normal(100_000), payload, threads=threads)
    assert bytes(payload) == encode(kernels.INT8, normal(100_000))
