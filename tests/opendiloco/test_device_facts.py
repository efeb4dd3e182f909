"""The device that a worker trains on."""

from __future__ import annotations

import pytest

from opendiloco.errors import MachineError
from opendiloco.inner.device_facts import choose_device


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
