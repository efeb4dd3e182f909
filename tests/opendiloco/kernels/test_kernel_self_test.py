from __future__ import annotations

from collections.abc import Iterator

import pytest

from opendiloco import kernels
from opendiloco.kernels import __main__ as command


@pytest.fixture(autouse=True)
def the_fastest_set_again() -> Iterator[None]:
    yield
    kernels.choose_kernels("")


def test_all_sets_agree_and_the_choice_stays() -> None:
    kernels.choose_kernels("scalar")
    assert kernels.differing_sets() == []
    assert kernels.chosen_kernels() == "scalar"


def test_a_set_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {name: [name.encode()] for name in kernels.supported_kernels()}
    monkeypatch.setattr(kernels, "_results", lambda name, values: results[name])
    assert kernels.differing_sets() == [name for name in kernels.supported_kernels() if name != "scalar"]


def test_the_command_shows_the_set_and_speeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "SECONDS_PER_OPERATION", 0.0)
    monkeypatch.setattr(kernels, "TIMED_VALUES", 10_000)
    command.main(["--threads", "2"])
    shown = capsys.readouterr().out
    assert f"kernels: {kernels.chosen_kernels()} (this machine has: scalar" in shown
    assert "int8, 2 threads:" in shown
    for operation in ("quantize", "dequantize", "accumulate", "outer step"):
        assert operation in shown


def test_wrong_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "differing_sets", lambda: ["avx2"])
    with pytest.raises(SystemExit, match=r"avx2 don't give the reference's bits .*DILOCO_KERNELS=scalar"):
        command.main([])
