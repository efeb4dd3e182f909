"""What an amendment's content means, and that nothing is done by one that is not understood."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.overrides import NO_OVERRIDES, Overrides
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import AmendmentError
from opendiloco.training.outer import LocalState
from peers.values.manifest import Amendment

UPGRADE = "Upgrade diloco-peer to the version that the organiser uses"
SETS: list[tuple[Overrides, bytes]] = [
    (NO_OVERRIDES, b"{}"),
    (Overrides(outer_learning_rate=0.1), b'{"outer_learning_rate":0.1}'),
    (
        Overrides(outer_momentum=-0.0, outer_learning_rate=1e-30),
        b'{"outer_learning_rate":1e-30,"outer_momentum":0.0}',
    ),
]
NOT_UNDERSTOOD = [
    (b"", r"its content"),
    (b"\xff", r"its content"),
    (b"[]", r"its content"),
    (b"null", r"its content"),
    (b'{"loss_scale":2}', r"loss_scale = 2: unknown key"),
    (b'{"outer_learning_rate":"0.4"}', r"outer_learning_rate = '0.4': not a number"),
    (b'{"outer_learning_rate":0}', r"outer_learning_rate = 0: too small"),
    (b'{"outer_momentum":1e-20}', r"a momentum of 1e-20 is too small"),
    (b'{"outer_learning_rate":0.40}', r"no canonical JSON"),
    (b'{"outer_learning_rate":0.4,"outer_learning_rate":0.4}', r"no canonical JSON"),
    (b'{"outer_momentum":null}', r"no canonical JSON"),
]


def amendment(content: bytes) -> Amendment:
    return Amendment(number=7, content=content, signature=bytes(64))


@pytest.mark.parametrize(("overrides", "content"), SETS)
def test_values_are_read_back_from_canonical_content(overrides: Overrides, content: bytes) -> None:
    assert overrides.content == content
    assert Overrides.read(amendment(content)) == overrides
    assert Overrides.read(None) == NO_OVERRIDES


@pytest.mark.parametrize(("content", "reason"), NOT_UNDERSTOOD)
def test_what_is_not_understood_is_an_error_that_says_to_upgrade(content: bytes, reason: str) -> None:
    with pytest.raises(AmendmentError, match=rf"(?s)amendment 7 .*{reason}.*{UPGRADE}") as raised:
        Overrides.read(amendment(content))
    assert raised.value.exit_code == 3


def test_a_delayed_momentum_stays_as_it_is(small_content: dict[str, Any]) -> None:
    outer = small_content["outer_optimizer"] | {"momentum_every": 2}
    config = RunConfig.from_manifest_content(small_content | {"outer_optimizer": outer})
    assert Overrides.of(amendment(b'{"outer_learning_rate":0.4}'), config).outer_learning_rate == 0.4
    with pytest.raises(AmendmentError, match=r"outer_momentum = 0\.5: the momentum of .* is delayed"):
        Overrides.of(amendment(b'{"outer_momentum":0.5}'), config)


def test_no_outer_step_is_taken_by_what_is_not_understood(small_config: RunConfig) -> None:
    state = LocalState(np.ones(2500, np.float32), small_config)
    payload = kernels.Payload(kernels.INT8, 2500)
    kernels.quantize(np.arange(2500, dtype=np.float32), payload)
    before = state.outer.digest()
    with pytest.raises(AmendmentError, match=UPGRADE):
        asyncio.run(state.apply(payload.buffer, 3, amendment=amendment(b'{"loss_scale":2}')))
    assert state.outer.digest() == before
