from __future__ import annotations

import math
from typing import Any

import pytest

from opendiloco.config.optimizers import OuterScheduleSection, ScheduleSection
from opendiloco.config.overrides import Decay
from opendiloco.config.run_config import RunConfig
from opendiloco.training.outer import learning_rate_factor
from peers.errors import ManifestError


def factors(schedule: OuterScheduleSection, steps: int) -> list[float]:
    return [learning_rate_factor(schedule, done) for done in range(1, steps + 1)]


def test_it_warms_up_stays_and_decays() -> None:
    schedule = ScheduleSection(warmup_steps=4, stable_steps=3, decay_steps=5, final_fraction=0.5)
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.5]
    assert factors(schedule, 14) == pytest.approx(expected)


def test_a_schedule_may_lack_any_of_its_parts() -> None:
    stable = ScheduleSection(warmup_steps=0, stable_steps=2, decay_steps=0, final_fraction=0.1)
    assert factors(stable, 4) == pytest.approx([1, 1, 0.1, 0.1])
    assert factors(ScheduleSection(warmup_steps=0, stable_steps=0, decay_steps=2), 3) == [0.5, 0, 0]


def test_a_decay_has_the_shape_that_it_is_given() -> None:
    ends = {"warmup_steps": 1, "stable_steps": 1, "decay_steps": 4, "final_fraction": 0.2}
    sqrt = factors(ScheduleSection.model_validate(ends | {"decay_shape": "sqrt"}), 7)
    assert sqrt == pytest.approx([1, 1, 0.6, 1 - 0.8 * math.sqrt(0.5), 1 - 0.8 * math.sqrt(0.75), 0.2, 0.2])
    cosine = factors(ScheduleSection.model_validate(ends | {"decay_shape": "cosine"}), 7)
    assert cosine == pytest.approx([1, 1, 0.6 + 0.4 * math.sqrt(0.5), 0.6, 0.6 - 0.4 * math.sqrt(0.5), 0.2, 0.2])


def test_another_decay_stands_in_place_of_the_schedules_own() -> None:
    schedule = ScheduleSection(warmup_steps=2, stable_steps=4, decay_steps=2, final_fraction=0.2)

    def with_decay(decay: Decay, steps: int, schedule: ScheduleSection = schedule) -> list[float]:
        return [learning_rate_factor(schedule, done, decay.fraction(2, done)) for done in range(1, steps + 1)]

    early = with_decay(Decay(after=2, outer_steps=2), 9)
    assert early == pytest.approx([0.5, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    late = with_decay(Decay(after=5, outer_steps=1), 13)
    assert late == pytest.approx([0.5, *[1] * 9, 0.6, 0.2, 0.2])
    warming = with_decay(Decay(after=0, outer_steps=2), 5)
    assert warming == pytest.approx([0.5, 1, 0.4, 0.2, 0.2]), "the warmup comes first"
    constant = with_decay(Decay(after=1, outer_steps=1), 4, ScheduleSection(kind="constant", warmup_steps=0))
    assert constant == pytest.approx([1, 1, 0.5, 0])
    shaped = schedule.model_copy(update={"decay_shape": "sqrt"})
    assert with_decay(Decay(after=1, outer_steps=2), 4, shaped)[3] == pytest.approx(1 - 0.8 * math.sqrt(0.5))


def test_a_cosine_follows_its_warmup_at_once() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=2, decay_steps=3, final_fraction=0.5)
    assert factors(schedule, 6) == pytest.approx([0.5, 1, 0.875, 0.625, 0.5, 0.5])


def test_a_constant_one_only_warms_up() -> None:
    assert factors(ScheduleSection(kind="constant", warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(ScheduleSection(kind="constant", warmup_steps=0), 2) == [1, 1]


def test_the_cosine_of_ours_is_the_cosine_to_the_last_bits() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=0, decay_steps=1000)
    exact = [(1 + math.cos(math.pi * done / 1000)) / 2 for done in range(1, 1001)]
    assert factors(schedule, 1000) == pytest.approx(exact, abs=1e-15)
    assert factors(schedule, 1000)[-1] == 0


def test_it_has_these_very_bits_on_every_machine() -> None:
    """Outer steps multiply by it. The bits were made once; another machine must make the same."""
    shapes: list[dict[str, Any]] = [
        {"kind": "cosine", "warmup_steps": 3, "decay_steps": 7},
        {"warmup_steps": 3, "stable_steps": 0, "decay_steps": 7, "decay_shape": "sqrt"},
        {"warmup_steps": 3, "stable_steps": 0, "decay_steps": 7, "final_fraction": 0.1},
    ]
    bits = [[learning_rate_factor(OuterScheduleSection(**shape), done).hex() for done in (2, 5, 8)] for shape in shapes]
    assert bits == [
        ["0x1.5555555555555p-1", "0x1.9f9d07145f6e9p-1", "0x1.818be3ae8245cp-3"],
        ["0x1.5555555555555p-1", "0x1.dca62353fb7acp-2", "0x1.3d1fc41eed17cp-3"],
        ["0x1.5555555555555p-1", "0x1.7c57c57c57c58p-1", "0x1.6db6db6db6db6p-2"],
    ]


def test_tokens_are_counted_where_the_keys_say_so() -> None:
    schedule = ScheduleSection(warmup_tokens=1000, stable_tokens=10**12, decay_tokens=10**12)
    assert schedule.unit == "tokens"
    assert schedule.total_steps is None
    counts = (1, 500, 1000, 1001, 10**12 + 1000, 3 * 10**12 // 2 + 1000, 2 * 10**12 + 1000)
    assert [learning_rate_factor(schedule, count) for count in counts] == [0.001, 0.5, 1, 1, 1, 0.5, 0]


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (
            {"warmup_steps": 1, "decay_steps": 1},
            'schedule: kind = "wsd" needs warmup_steps, stable_steps, decay_steps, ',
        ),
        (
            {"kind": "cosine", "warmup_steps": 1, "stable_steps": 2, "decay_steps": 1},
            'schedule: kind = "cosine" needs ',
        ),
        (
            {"kind": "constant", "warmup_steps": 1, "warmup_tokens": 5},
            'schedule: kind = "constant" needs warmup_tokens,',
        ),
        ({"kind": "constant"}, 'schedule: kind = "constant" needs warmup_steps, but the keys given are none; give'),
        ({"kind": "linear", "warmup_steps": 1}, "schedule.kind = 'linear': not known here. Use 'wsd', 'cosine' or"),
        (
            {"kind": "cosine", "warmup_steps": 1, "decay_steps": 1, "decay_shape": "sqrt"},
            'schedule: decay_shape needs kind = "wsd", but kind is "cosine"; remove decay_shape',
        ),
        ({"kind": "constant", "warmup_steps": 1}, "this schedule has no length in steps; give outer_"),
        ({"kind": "cosine", "warmup_tokens": 1, "decay_tokens": 9}, "this schedule has no length in steps"),
    ],
)
def test_a_schedule_that_is_wrong_is_refused(
    small_content: dict[str, Any], schedule: dict[str, Any], said: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        RunConfig.from_manifest_content(small_content | {"schedule": schedule})
    assert str(caught.value).startswith(f"manifest: {said}")


def test_the_outer_schedule_goes_by_steps_only(small_content: dict[str, Any]) -> None:
    outer = {"schedule": {"kind": "constant", "warmup_tokens": 5}}
    with pytest.raises(
        ManifestError, match=r"outer_optimizer.schedule.warmup_tokens = 5: unknown key. Did you mean warm"
    ):
        RunConfig.from_manifest_content(small_content | {"outer_optimizer": outer})
