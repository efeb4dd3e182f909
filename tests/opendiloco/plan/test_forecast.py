"""Rounds of our own protocol, and what follows from them, on numbers that a person can check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opendiloco.plan.comparison import Settings, compare, least, methods_of, ways_to
from opendiloco.plan.forecast import Plan, forecast
from opendiloco.plan.methods import QUANTIZED, Shape, diloco, streaming
from opendiloco.plan.report import full_link_lines, how_often, too_slow_lines
from opendiloco.plan.rounds import DELAYS, LINK_SHARE, STEPPED, Peer, Swarm, round_of
from opendiloco.plan.setup import bits_of, encoded_by

MBIT = 1e6
SHAPE = Shape((16_000_000,) * 4, rest=36_000_000)
"""A hundred million values."""
SETTINGS = Settings(fragment_layers=1, overlap=5, bits=8, fewer_bits=4)


def peer(mbit: float = 200, step_seconds: float = 1.0, count: int = 1, **more: float) -> Peer:
    return Peer("", count, mbit * MBIT, mbit * MBIT, more.pop("latency", 0.0), step_seconds, **more)  # type: ignore[arg-type]


def plan(*peers: Peer, inner_steps: int = 100) -> Plan:
    return Plan(SHAPE, Swarm(peers), inner_steps, tokens_per_step=1000, smallest_share=0.125, snapshot_every=4)


def test_a_codecs_bits_have_their_share_of_its_blocks_headers() -> None:
    assert [bits_of(codec) for codec in ("fp16", "e3m0", "sparse")] == [16, 4 + 32 / 1024, (64 * 14 + 32) / 4096]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_equal_links_carry_the_bound_of_any_all_reduce(count: int) -> None:
    found = round_of(Swarm((peer(count=count),)), SHAPE.values, 8)
    assert found.moved == pytest.approx([2 * (count - 1) / count], rel=0.02)
    assert found.transfer == pytest.approx(2 * (count - 1) / count * 8e8 / (LINK_SHARE * 200 * MBIT), rel=0.02)


def test_a_slow_link_reduces_nothing_and_still_sends_and_gets_a_payload() -> None:
    found = round_of(Swarm((peer(20), peer(200, count=3))), SHAPE.values, 8)
    assert found.moved[0] == 1
    assert found.transfer == pytest.approx(8e8 / (LINK_SHARE * 20 * MBIT))


def test_delays_are_those_of_the_two_that_are_furthest_apart() -> None:
    swarm = Swarm((peer(latency=0.1), peer(latency=0.02, count=3)))
    found = round_of(swarm, SHAPE.values, 8)
    assert found.delays == pytest.approx(DELAYS * (0.1 + 0.02) / 2)
    assert Swarm((peer(latency=0.1, count=2),)).delay == pytest.approx(0.1)
    assert found.arithmetic == pytest.approx(1e8 / QUANTIZED + 1e8 / STEPPED)


def test_sparse_payloads_take_longer_to_encode() -> None:
    """Regression: they were charged what int8 takes."""
    assert encoded_by("sparse") < encoded_by("int8")
    settings = replace(SETTINGS, encoded=encoded_by("sparse"))
    found, usual = compare(plan(peer(count=2)), settings), compare(plan(peer(count=2)), SETTINGS)
    more = 1e8 / encoded_by("sparse") - 1e8 / encoded_by("int8")
    assert found[1].round_seconds - usual[1].round_seconds == pytest.approx(more)
    assert found[-1] == usual[-1], "it has a codec of its own"


def test_a_blocking_round_costs_its_seconds_once_a_cycle() -> None:
    alike = plan(peer(count=2))
    found = forecast(alike, diloco(SHAPE, 100, 8))
    assert found.cycle_seconds == pytest.approx(100 + found.round_seconds)
    assert found.utilisation == pytest.approx(100 / found.cycle_seconds)
    assert found.tokens_per_day == pytest.approx(2 * 100 * 1000 / found.cycle_seconds * 86_400)


def test_overlap_hides_rounds_that_take_less_than_its_steps() -> None:
    alike = plan(peer(count=2))
    blocking = forecast(alike, streaming("", SHAPE, 100, 1, 0, 8))
    hidden = forecast(alike, streaming("", SHAPE, 100, 1, 5, 8))
    assert blocking.utilisation < 0.96
    assert hidden.utilisation == pytest.approx(1)
    assert hidden.round_seconds < 5


def test_a_fragment_is_taken_its_overlap_before_it_is_due_and_never_before_the_cycle() -> None:
    """Of five fragments in ten steps three are taken when a cycle begins, and the last of them comes late."""
    shape = Shape((20_000_000,) * 5)
    tight = replace(plan(peer(count=2)), shape=shape, inner_steps=10)
    [seconds] = {each.transfer for each in [round_of(tight.swarm, 20_000_000, 8)]}
    lag = 2e7 / QUANTIZED + 2e7 / STEPPED
    found = forecast(tight, streaming("", shape, 10, 1, 6, 8))
    assert found.cycle_seconds == pytest.approx(10)
    hasty = forecast(
        replace(tight, swarm=Swarm((peer(200 * seconds / 3, count=2),))), streaming("", shape, 10, 1, 6, 8)
    )
    assert hasty.cycle_seconds == pytest.approx(5 * 3 + lag, rel=0.05)


def test_while_a_round_waits_for_its_last_messages_the_link_carries_the_next() -> None:
    far = replace(plan(peer(count=2, latency=10.0)), inner_steps=10)
    method = streaming("", SHAPE, 10, 1, 9, 8)
    sent = sum(round_of(far.swarm, fragment.values, 8).transfer for fragment in method.fragments)
    assert sent < 10
    assert max(round_of(far.swarm, fragment.values, 8).delays for fragment in method.fragments) == 60
    assert forecast(far, method).cycle_seconds < 5 * 60


def test_slow_machines_make_fewer_inner_steps_and_hold_nobody_up() -> None:
    uneven = plan(peer(step_seconds=1.0), peer(step_seconds=5.0), peer(step_seconds=1.04))
    found = forecast(uneven, diloco(SHAPE, 100, 8))
    assert [each.inner_steps for each in found.peers] == [100, 20, 100]
    assert [each.cycles for each in found.peers] == [1, 1, 1]
    assert found.cycle_seconds == pytest.approx(104 + found.round_seconds), "within the grace"
    assert uneven.own_steps(peer(step_seconds=100.0)) == 13, "the smallest share"


def test_nobody_waits_longer_than_the_grace() -> None:
    """A peer that is late is in the next entry, or the one after; a lease does not last for ever."""
    fast = peer(step_seconds=1.0, count=3)
    uneven = plan(fast, peer(step_seconds=1.2), peer(step_seconds=12.0), peer(step_seconds=20.0))
    found = forecast(uneven, diloco(SHAPE, 100, 8))
    assert [each.inner_steps for each in found.peers] == [100, 84, 13, 13]
    assert [each.cycles for each in found.peers] == [1, 1, 2, 0]
    assert found.cycle_seconds == pytest.approx(84 * 1.2 + found.round_seconds)
    tokens = (3 * 100 + 84 + 13 / 2) * 1000
    assert found.tokens_per_day == pytest.approx(tokens / found.cycle_seconds * 86_400)
    [line] = too_slow_lines(uneven, found)
    assert "takes 4.33 min for 13 inner steps" in line
    assert how_often(4) == "every 4th"
    patient = forecast(replace(uneven, staleness=2), diloco(SHAPE, 100, 8))
    assert [each.cycles for each in patient.peers] == [1, 1, 2, 3]


def test_in_an_asynchronous_run_whoever_is_late_fills_its_cycles() -> None:
    fast = peer(step_seconds=1.0, count=3)
    uneven = replace(plan(fast, peer(step_seconds=1.2), peer(step_seconds=12.0)), contributions=0.5)
    found = forecast(uneven, diloco(SHAPE, 100, 8))
    assert [each.inner_steps for each in found.peers] == [100, 84, 15]
    assert [each.cycles for each in found.peers] == [1, 1, 2]
    assert found.peers[2].utilisation > 0.8
    assert uneven.closes_after == 105.0, "what speeds are off by"
    assert replace(uneven, contributions=1.0).closes_after == 15 * 12 + 5


def test_an_entry_needs_most_of_the_peers_however_slow_they_are() -> None:
    slow = plan(peer(step_seconds=1.0), peer(step_seconds=12.0), peer(step_seconds=13.0))
    found = forecast(slow, diloco(SHAPE, 100, 8))
    assert found.cycle_seconds == pytest.approx(13 * 12 + found.round_seconds), "the second of three"


def test_joining_is_a_snapshot_and_the_entries_since() -> None:
    """Among peers that train for very long, all of a link's time is left for joiners."""
    calm = plan(peer(count=4), inner_steps=100_000)
    found = forecast(calm, diloco(SHAPE, 100_000, 8))
    rate = LINK_SHARE * 200 * MBIT
    assert found.joining == pytest.approx((64e8 + 4 * 8e8) / rate, rel=0.001)


def test_nobody_joins_where_links_have_no_time_left() -> None:
    busy = plan(peer(1, count=4), inner_steps=10)
    assert forecast(busy, streaming("", SHAPE, 10, 1, 5, 8)).joining is None


def test_cost_is_known_only_where_all_prices_are() -> None:
    priced, free = peer(price_per_hour=2.0, count=3), peer()
    both = forecast(plan(priced, replace(free, price_per_hour=0.0)), diloco(SHAPE, 100, 8))
    assert both.cost_per_day == pytest.approx(24 * 3 * 2)
    assert both.cost_per_giga_token == pytest.approx(144 / both.tokens_per_day * 1e9)
    assert forecast(plan(priced, free), diloco(SHAPE, 100, 8)).cost_per_day is None


def test_each_method_is_at_least_as_good_as_the_one_before() -> None:
    found = [each.utilisation for each in compare(plan(peer(20, count=4)), SETTINGS)]
    assert found[0] < found[1]
    assert found[1] == pytest.approx(found[2], rel=0.02), "blocking, the same bytes take the same time"
    assert found[2] < found[3] < found[4]


@pytest.mark.parametrize("target", [0.9, 0.99])
def test_ways_reach_the_target_and_one_less_does_not(target: float) -> None:
    slow = plan(peer(20, latency=0.05, count=4))

    def reached(place: int, inner_steps: int = 100, overlap: int = 5) -> float:
        changed = replace(slow, inner_steps=inner_steps)
        return forecast(changed, methods_of(changed, replace(SETTINGS, overlap=overlap))[place]).utilisation

    for place, way in enumerate(ways_to(slow, SETTINGS, target), 1):
        assert way.inner_steps is not None
        assert reached(place, inner_steps=way.inner_steps) >= target
        assert reached(place, inner_steps=way.inner_steps - 1) < target or way.inner_steps == 6
        if way.overlap:
            assert reached(place, overlap=way.overlap) >= target > reached(place, overlap=way.overlap - 1)


def test_least_is_none_where_nothing_suffices() -> None:
    assert least(lambda number: number >= 7, 1, 100) == 7
    assert least(lambda number: False, 1, 100) is None
    assert least(lambda number: True, 5, 4) is None


# INTELLECT-1 (arXiv 2412.01152, Table 2): 10 B parameters as int8, H = 100 in 38 minutes, links of 0.5 to 4 Gbit/s ----
INNER_SECONDS = 38 * 60 / 100
MEASURED = {"USA": (103.0, 0.957), "USA and Europe": (382.0, 0.856), "global": (469.0, 0.830)}
LLAMA_10B = Shape((218_112_000,) * 42, rest=1_050_677_248)


def intellect(mbit: float, count: int = 14) -> Plan:
    return replace(plan(peer(mbit, INNER_SECONDS, count)), shape=LLAMA_10B)


@pytest.mark.parametrize("region", MEASURED)
def test_utilisation_follows_from_the_all_reduce_that_intellect_measured(region: str) -> None:
    """The links are chosen so that the round takes as long as was measured; the rest is ours."""
    seconds, measured = MEASURED[region]
    transfer = round_of(intellect(1000).swarm, LLAMA_10B.values, 8).transfer
    arithmetic = LLAMA_10B.values * (1 / QUANTIZED + 1 / STEPPED)
    found = forecast(intellect(1000 * transfer / (seconds - arithmetic)), diloco(LLAMA_10B, 100, 8))
    assert found.round_seconds == pytest.approx(seconds)
    assert found.utilisation == pytest.approx(measured, abs=0.002)


def test_intellects_run_over_200_mbit_is_bound_by_computing_only_with_overlap() -> None:
    """Rounds of 850 s as int8 beside 2,280 s of training. A fragment in 4 bits has 114 s; the largest takes 43."""
    alone, *_, last = compare(intellect(200), replace(SETTINGS, fragment_layers=3, bits=8.03, fewer_bits=4.03))[1:]
    assert alone.utilisation == pytest.approx(0.73, abs=0.01)
    assert last.utilisation == pytest.approx(1)
    assert last.round_seconds == pytest.approx(43, abs=1)


def test_intellects_links_allow_about_the_times_that_were_measured() -> None:
    """0.5 to 4 Gbit/s make rounds of 52 to 332 s: 103 s lies within. The two with an ocean between took up to 1.4 times
    as long as the slowest of these links needs: its ring goes over lossy links, and we leave loss out."""
    slowest, fastest = (forecast(intellect(mbit), diloco(LLAMA_10B, 100, 8)).round_seconds for mbit in (500, 4000))
    assert fastest < MEASURED["USA"][0] < slowest
    assert all(slowest < seconds < 1.5 * slowest for seconds in (MEASURED["USA and Europe"][0], MEASURED["global"][0]))
    assert [fastest, slowest] == pytest.approx([52, 332], abs=1)


def test_a_link_that_rounds_need_all_of_is_named() -> None:
    """Four peers with 25 Mbit/s were planned to compute for 0.99 of their time with eight bits, and did for 0.68."""
    shape = Shape((3_125_000,) * 8)
    equal = replace(plan(peer(25, step_seconds=0.5, count=4)), shape=shape, inner_steps=28)
    ways = [("eight bits", 5, 8.0), ("four bits", 5, 4.0), ("waits", 0, 8.0)]
    found = [forecast(equal, streaming(name, shape, 28, 1, overlap, bits)) for name, overlap, bits in ways]
    assert found[0].utilisation > 0.95
    [line] = full_link_lines(found)
    assert line.startswith("too full: with eight bits the link of")
