"""What an amendment's content means, and that nothing is done by one that is not understood."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from opendiloco import kernels
from opendiloco.config.overrides import NO_OVERRIDES, Decay, Overrides, mixture_phases
from opendiloco.config.run_config import RunConfig
from opendiloco.errors import AmendmentError
from opendiloco.training.outer import LocalState
from peers.values.manifest import Amendment, LoggedAmendment

UPGRADE = "Upgrade diloco-peer to the organiser's version"
SETS: list[tuple[Overrides, bytes]] = [
    (NO_OVERRIDES, b"{}"),
    (Overrides(inner_learning_rate_factor=0.5), b'{"inner_learning_rate_factor":0.5}'),
    (
        Overrides(decay=Decay(after=600, outer_steps=100), outer_steps=700),
        b'{"decay":{"after":600,"outer_steps":100},"outer_steps":700}',
    ),
    (Overrides(weights=(0, 0.25, 3)), b'{"weights":[0.0,0.25,3.0]}'),
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
    (b'{"inner_learning_rate_factor":1.5}', r"inner_learning_rate_factor = 1.5: too large"),
    (b'{"weights":[]}', r"weights"),
    (b'{"weights":[1,-1]}', r"weights.1 = -1: too small"),
    (b'{"outer_steps":0}', r"outer_steps = 0: too small"),
    (b'{"outer_steps":7.0}', r"outer_steps = 7.0: not a whole number"),
    (b'{"decay":{"outer_steps":100}}', r"decay.after: is missing"),
    (b'{"decay":{"after":1,"end":9,"outer_steps":3}}', r"decay.end = 9: unknown key"),
    (b'{"outer_learning_rate":0.40}', r"not canonical JSON"),
    (b'{"outer_learning_rate":0.4,"outer_learning_rate":0.4}', r"not canonical JSON"),
    (b'{"outer_momentum":null}', r"not canonical JSON"),
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
    with pytest.raises(AmendmentError, match=rf"(?s)amendment 7: .*{reason}.*{UPGRADE}") as raised:
        Overrides.read(amendment(content))
    assert raised.value.exit_code == 3


def test_a_delayed_momentum_stays_as_it_is(small_content: dict[str, Any]) -> None:
    outer = small_content["outer_optimizer"] | {"momentum_every": 2}
    config = RunConfig.from_manifest_content(small_content | {"outer_optimizer": outer})
    assert Overrides.of(amendment(b'{"outer_learning_rate":0.4}'), config).outer_learning_rate == 0.4
    with pytest.raises(AmendmentError, match=r"outer_momentum = 0\.5: the run .* delays its momentum"):
        Overrides.of(amendment(b'{"outer_momentum":0.5}'), config)


def test_a_cosine_that_decays_already_begins_no_decay(small_content: dict[str, Any]) -> None:
    schedule = {"kind": "cosine", "warmup_steps": 2, "decay_steps": 20}
    config = RunConfig.from_manifest_content(small_content | {"schedule": schedule})
    with pytest.raises(AmendmentError, match=r'decay: a schedule of kind "cosine" decays from its warmup on'):
        Overrides.of(amendment(b'{"decay":{"after":3,"outer_steps":2}}'), config)


def test_a_run_is_no_longer_than_its_tokens_can_be_counted(small_content: dict[str, Any]) -> None:
    training = small_content["training"] | {"inner_steps": 10**6, "batch_size": 10**4}
    config = RunConfig.from_manifest_content(small_content | {"training": training})
    assert Overrides.of(amendment(b'{"outer_steps":6250}'), config).total_outer_steps(config) == 6250
    with pytest.raises(AmendmentError, match=r"outer_steps = 6251: .* Use 6250 or less"):
        Overrides.of(amendment(b'{"outer_steps":6251}'), config)


def test_the_values_in_force_are_the_manifests_where_nothing_else_is_set(small_config: RunConfig) -> None:
    manifests = {
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.6,
        "inner_learning_rate_factor": 1.0,
        "decay": None,
        "outer_steps": 7,
        "weights": [1.0],
    }
    assert NO_OVERRIDES.values(small_config) == manifests
    assert manifests.keys() == Overrides.model_fields.keys(), "all that can be amended is shown"
    set_here = Overrides(outer_momentum=0.0, decay=Decay(after=3, outer_steps=2), outer_steps=5)
    changed = {"outer_momentum": 0.0, "decay": {"after": 3, "outer_steps": 2}, "outer_steps": 5}
    assert set_here.values(small_config) == manifests | changed
    assert str(set_here) == "outer momentum 0, decay of 2 outer steps after 3, outer steps 5"
    assert str(NO_OVERRIDES) == "the manifest's values"


@pytest.fixture
def mixed(small_content: dict[str, Any]) -> RunConfig:
    """A run whose third source waits for its cool-down."""
    sources = [{"source": name, "weight": weight} for name, weight in (("stdlib", 3), ("code", 1), ("best", 0))]
    return RunConfig.from_manifest_content(small_content | {"data": {"sources": sources}})


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ((1, 1), "2 are given, but the run has 3 sources. Give one for each source"),
        ((0, 0, 0), "all weights are 0"),
        ((0.123457, 1, 1), "these weights need a cycle of"),
    ],
)
def test_weights_are_those_that_run_toml_could_have(weights: tuple[float, ...], reason: str, mixed: RunConfig) -> None:
    with pytest.raises(AmendmentError, match=rf"weights: .*{reason}"):
        Overrides.of(amendment(Overrides(weights=weights).content), mixed)


def test_what_an_amendment_has_no_room_for_is_a_problem(small_content: dict[str, Any]) -> None:
    sources = [{"source": f"source-{number}", "weight": 1} for number in range(64)]
    config = RunConfig.from_manifest_content(small_content | {"data": {"sources": sources}})
    assert not Overrides(weights=(1.5,) * 64, outer_learning_rate=0.35).problem(config)
    assert "bytes, and at most 512 are allowed" in Overrides(weights=(100.125,) * 64).problem(config)


def logged(cursor: int, **values: object) -> LoggedAmendment:
    return LoggedAmendment(amendment=amendment(Overrides.model_validate(values).content), cursor=cursor)


def test_each_mixture_holds_from_the_first_sample_on_that_was_in_no_lease(mixed: RunConfig) -> None:
    cool, half = {"weights": (0, 0, 2)}, {"weights": (3, 1, 4)}
    assert mixture_phases([], mixed) == ()
    assert mixture_phases([logged(40, outer_steps=9)], mixed) == ()
    assert mixture_phases([logged(40, **half), logged(90, **cool)], mixed) == ((40, (3, 1, 4)), (90, (0, 0, 1)))
    assert mixture_phases([logged(40, **half), logged(60, **half, outer_steps=9)], mixed) == ((40, (3, 1, 4)),)
    assert mixture_phases([logged(40, **half), logged(60)], mixed) == ((40, (3, 1, 4)), (60, (3, 1, 0)))
    assert mixture_phases([logged(40, **half), logged(40, **cool)], mixed) == ((40, (0, 0, 1)),)
    assert mixture_phases([logged(40, **half), logged(40)], mixed) == ()


def test_no_outer_step_is_taken_by_what_is_not_understood(small_config: RunConfig) -> None:
    state = LocalState(np.ones(2500, np.float32), small_config)
    payload = kernels.Payload(kernels.INT8, 2500)
    kernels.quantize(np.arange(2500, dtype=np.float32), payload)
    before = state.outer.digest()
    with pytest.raises(AmendmentError, match=UPGRADE):
        asyncio.run(state.apply(payload.buffer, 3, amendment=amendment(b'{"loss_scale":2}')))
    assert state.outer.digest() == before
