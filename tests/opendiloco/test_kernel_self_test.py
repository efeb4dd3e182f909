from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from opendiloco import kernels
from opendiloco.cli.group import main
from opendiloco.kernels import self_test


@pytest.fixture(autouse=True)
def the_fastest_set_again() -> Iterator[None]:
    yield
    kernels.choose_kernels("")


def test_all_sets_agree_and_the_choice_stays() -> None:
    kernels.choose_kernels("scalar")
    assert self_test.differing_sets() == []
    assert kernels.chosen_kernels() == "scalar"


def test_a_set_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {name: [name.encode()] for name in kernels.supported_kernels()}
    monkeypatch.setattr(self_test, "_results", lambda name, values: results[name])
    assert self_test.differing_sets() == [name for name in kernels.supported_kernels() if name != "scalar"]


def test_the_command_shows_the_set_and_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "SECONDS_PER_OPERATION", 0.0)
    monkeypatch.setattr(self_test, "TIMED_VALUES", 10_000)
    done = CliRunner().invoke(main, ["kernels", "--threads", "2"])
    assert done.exit_code == 0
    assert f"kernels: {kernels.chosen_kernels()} (this machine has: scalar" in done.output
    assert "int8, 2 threads:" in done.output
    for operation in ("quantize", "dequantize", "accumulate", "outer step"):
        assert operation in done.output


def test_wrong_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "differing_sets", lambda: ["avx2"])
    done = CliRunner().invoke(main, ["kernels"])
    assert done.exit_code == 6
    assert "avx2 don't give the reference's bits" in done.stderr
    assert "DILOCO_KERNELS=scalar" in done.stderr
