"""What an organiser changes of a run that goes on: signed, numbered, and within run.toml's bounds."""

from __future__ import annotations

from math import inf, nan

import pytest

from opendiloco.config.optimizers import OuterOptimizerSection
from peers.values.identity import Identity
from peers.values.manifest import Amendment, newest
from peers.values.wire import WireError, pack, unpack

ORGANISER, STRANGER = Identity.of_seed(bytes(32)), Identity.of_seed(bytes(31) + b"1")
RUN = "tiny"


def amendment(number: int = 1, learning_rate: float = 0.4, momentum: float = 0.9, run: str = RUN) -> Amendment:
    return Amendment.sign(run, number, learning_rate, momentum, ORGANISER)


def test_the_organiser_alone_amends_a_run_and_for_each_run_anew() -> None:
    signed = amendment()
    assert signed.is_signed(RUN, ORGANISER.peer_id)
    assert not signed.is_signed(RUN, STRANGER.peer_id)
    assert not signed.is_signed("another", ORGANISER.peer_id)
    assert not signed.is_signed(RUN, "")


@pytest.mark.parametrize("change", [{"number": 2}, {"learning_rate": 0.5}, {"momentum": 0.8}, {"momentum": 0.0}])
def test_every_value_is_signed(change: dict[str, float]) -> None:
    assert not amendment().model_copy(update=change).is_signed(RUN, ORGANISER.peer_id)


def test_it_crosses_the_network_in_few_bytes() -> None:
    """Heartbeats have it, too."""
    packed = pack(amendment(1000))
    assert unpack(Amendment, packed) == amendment(1000)
    assert len(packed) < 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 0),
        ("number", True),
        ("learning_rate", 0.0),
        ("learning_rate", -0.1),
        ("learning_rate", 100.5),
        ("learning_rate", nan),
        ("learning_rate", "0.4"),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", inf),
    ],
)
def test_values_out_of_bounds_are_no_amendment(field: str, value: object) -> None:
    with pytest.raises(WireError, match=field):
        unpack(Amendment, pack(amendment().model_copy(update={field: value})))


@pytest.mark.parametrize("momentum", [0.0, -0.0])
def test_minus_zero_is_no_other_momentum(momentum: float) -> None:
    """Regression: equal values with other bytes shared a verdict, so that whoever repeated an amendment so had the
    real one refused, or the false one signed."""
    real = amendment(momentum=0.0)
    heard = unpack(Amendment, pack(real.model_copy(update={"momentum": momentum})))
    assert heard.is_signed(RUN, ORGANISER.peer_id)
    assert pack(heard) == pack(real)


@pytest.mark.parametrize("momentum", [1e-20, 0.0009])
def test_a_momentum_is_none_or_enough_to_divide_by(momentum: float) -> None:
    with pytest.raises(ValueError, match="too small"):
        amendment(momentum=momentum)
    with pytest.raises(ValueError, match="too small"):
        OuterOptimizerSection(momentum=momentum)


def test_the_newest_has_the_highest_number_and_of_two_the_first() -> None:
    one, other, second = amendment(1, 0.4), amendment(1, 0.5), amendment(2)
    assert newest() is newest(None) is None
    assert newest(None, one, second, other) is second
    assert newest(one, other) is one
    assert newest(other, one) is other
