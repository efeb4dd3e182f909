"""Rounds of our own protocol, and what follows from them, on numbers that a person can check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opendiloco.tools.plan import (
    DELAYS,
    DELAYS_OF_MORE,
    LINK_SHARE,
    QUANTIZED,
    QUANTIZED_SPARSE,
    STEPPED,
    PeerGroup,
    Plan,
    _bits_of,
    _how_often,
    _warnings,
    forecast,
    least_bandwidth,
    round_of,
)
from peers.log.settings import Timing
from peers.protocol.planning import LEAST_PAYLOADS

MBIT = 1e6
VALUES = 100_000_000
FRAGMENTS = (16_000_000,) * 4 + (36_000_000,)
"""As many values, cut up."""


def peer(mbit: float = 200, step_seconds: float = 1.0, count: int = 1, **more: float) -> PeerGroup:
    return PeerGroup("", count, mbit * MBIT, mbit * MBIT, more.pop("latency", 0.0), step_seconds, **more)  # type: ignore[arg-type]


def plan(*peers: PeerGroup, inner_steps: int = 100) -> Plan:
    return Plan((VALUES,), peers, inner_steps, tokens_per_step=1000, smallest_share=0.125, snapshot_every=4, bits=8)


def test_a_codecs_bits_have_their_share_of_its_blocks_headers() -> None:
    assert [_bits_of(codec) for codec in ("fp16", "e3m0", "sparse")] == [16, 4 + 32 / 1024, (64 * 14 + 32) / 4096]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_equal_links_carry_the_bound_of_any_all_reduce(count: int) -> None:
    found = round_of([peer(count=count)], VALUES, 8)
    assert found.received == pytest.approx([2 * (count - 1) / count], rel=0.02)
    assert found.transfer == pytest.approx(2 * (count - 1) / count * 8e8 / (LINK_SHARE * 200 * MBIT), rel=0.02)


def test_a_slow_link_reduces_nothing_and_still_sends_and_gets_a_payload() -> None:
    found = round_of([peer(20), peer(200, count=3)], VALUES, 8)
    assert found.received[0] == 1
    assert found.transfer == pytest.approx(8e8 / (LINK_SHARE * 20 * MBIT))


def test_delays_are_those_of_the_two_that_are_furthest_apart() -> None:
    peers = [peer(latency=0.1), peer(latency=0.02, count=3)]
    found = round_of(peers, VALUES, 8)
    assert found.delays == pytest.approx(DELAYS * (0.1 + 0.02) / 2)
    assert round_of([peer(latency=0.1, count=2)], VALUES, 8).delays == pytest.approx(DELAYS * 0.1)
    assert round_of([peer(latency=0.1, count=16)], VALUES, 8).delays == pytest.approx(DELAYS * 0.1)
    assert round_of([peer(latency=0.1, count=17)], VALUES, 8).delays == pytest.approx(DELAYS_OF_MORE * 0.1)
    assert found.arithmetic == pytest.approx(1e8 / QUANTIZED + 1e8 / STEPPED)


def test_sparse_payloads_take_longer_to_encode() -> None:
    """Regression: they were charged what int8 takes."""
    usual = plan(peer(count=2))
    sparse = replace(usual, encoded=QUANTIZED_SPARSE)
    more = 1e8 / QUANTIZED_SPARSE - 1e8 / QUANTIZED
    assert forecast(sparse).round_seconds - forecast(usual).round_seconds == pytest.approx(more)


def test_a_blocking_round_costs_its_seconds_once_a_cycle() -> None:
    alike = plan(peer(count=2))
    found = forecast(alike)
    assert found.cycle_seconds == pytest.approx(100 + found.round_seconds)
    assert found.utilisation == pytest.approx(100 / found.cycle_seconds)
    assert found.tokens_per_day == pytest.approx(2 * 100 * 1000 / found.cycle_seconds * 86_400)


def test_overlap_hides_rounds_that_take_less_than_its_steps() -> None:
    blocking = replace(plan(peer(count=2)), fragments=FRAGMENTS)
    assert forecast(blocking).utilisation < 0.96
    hidden = forecast(replace(blocking, overlap=5))
    assert hidden.utilisation == pytest.approx(1)
    assert hidden.round_seconds < 5


def test_a_fragment_is_taken_its_overlap_before_it_is_due_and_never_before_the_cycle() -> None:
    """Of five fragments in ten steps three are taken when a cycle begins, and the last of them comes late."""
    tight = replace(plan(peer(count=2), inner_steps=10), fragments=(20_000_000,) * 5, overlap=6)
    [seconds] = {each.transfer for each in tight.rounds}
    lag = 2e7 / QUANTIZED + 2e7 / STEPPED
    assert forecast(tight).cycle_seconds == pytest.approx(10)
    hasty = forecast(replace(tight, peers=(peer(200 * seconds / 3, count=2),)))
    assert hasty.cycle_seconds == pytest.approx(5 * 3 + lag, rel=0.05)


def test_while_a_round_waits_for_its_last_messages_the_link_carries_the_next() -> None:
    far = replace(plan(peer(count=2, latency=10.0), inner_steps=10), fragments=FRAGMENTS, overlap=9)
    assert sum(each.transfer for each in far.rounds) < 10
    assert max(each.delays for each in far.rounds) == 80
    assert forecast(far).cycle_seconds < 5 * 80


def test_slow_machines_make_fewer_inner_steps_and_hold_nobody_up() -> None:
    uneven = plan(peer(step_seconds=1.0), peer(step_seconds=5.0), peer(step_seconds=1.04))
    found = forecast(uneven)
    assert [each.inner_steps for each in found.peers] == [100, 20, 100]
    assert [each.cycles for each in found.peers] == [1, 1, 1]
    assert found.cycle_seconds == pytest.approx(104 + found.round_seconds), "within the grace"
    assert uneven.own_steps(peer(step_seconds=100.0)) == 13, "the smallest share"


def test_nobody_waits_longer_than_the_grace() -> None:
    """A peer that is late is in the next entry, or the one after; a lease does not last for ever."""
    fast = peer(step_seconds=1.0, count=3)
    uneven = plan(fast, peer(step_seconds=1.2), peer(step_seconds=12.0), peer(step_seconds=20.0))
    found = forecast(uneven)
    assert [each.inner_steps for each in found.peers] == [100, 84, 13, 13]
    assert [each.cycles for each in found.peers] == [1, 1, 2, 0]
    assert found.cycle_seconds == pytest.approx(84 * 1.2 + found.round_seconds)
    tokens = (3 * 100 + 84 + 13 / 2) * 1000
    assert found.tokens_per_day == pytest.approx(tokens / found.cycle_seconds * 86_400)
    [line] = _warnings(uneven, found)
    assert "takes 4.33 min for 13 inner steps" in line
    assert _how_often(4) == "every 4th"
    patient = forecast(replace(uneven, staleness=2))
    assert [each.cycles for each in patient.peers] == [1, 1, 2, 3]


def test_in_an_asynchronous_run_whoever_is_late_fills_its_cycles() -> None:
    fast = peer(step_seconds=1.0, count=3)
    uneven = replace(plan(fast, peer(step_seconds=1.2), peer(step_seconds=12.0)), contributions=0.5)
    found = forecast(uneven)
    assert [each.inner_steps for each in found.peers] == [100, 84, 15]
    assert [each.cycles for each in found.peers] == [1, 1, 2]
    assert found.peers[2].utilisation > 0.8
    assert uneven.closes_after == 105.0, "what speeds are off by"
    assert replace(uneven, contributions=1.0).closes_after == 15 * 12 + 5


def test_an_entry_needs_most_of_the_peers_however_slow_they_are() -> None:
    slow = plan(peer(step_seconds=1.0), peer(step_seconds=12.0), peer(step_seconds=13.0))
    found = forecast(slow)
    assert found.cycle_seconds == pytest.approx(13 * 12 + found.round_seconds), "the second of three"


def test_joining_is_a_snapshot_and_the_entries_since() -> None:
    """Among peers that train for very long, all of a link's time is left for joiners."""
    calm = plan(peer(count=4), inner_steps=100_000)
    found = forecast(calm)
    rate = LINK_SHARE * 200 * MBIT
    assert found.joining == pytest.approx((64e8 + 4 * 8e8) / rate, rel=0.001)


def test_nobody_joins_where_links_have_no_time_left() -> None:
    busy = replace(plan(peer(1, count=4), inner_steps=10), fragments=FRAGMENTS, overlap=5)
    assert forecast(busy).joining is None


def test_cost_is_known_only_where_all_prices_are() -> None:
    priced, free = peer(price_per_hour=2.0, count=3), peer()
    both = forecast(plan(priced, replace(free, price_per_hour=0.0)))
    assert both.cost_per_day == pytest.approx(24 * 3 * 2)
    assert both.cost_per_giga_token == pytest.approx(144 / both.tokens_per_day * 1e9)
    assert forecast(plan(priced, free)).cost_per_day is None


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_bandwidth_that_is_needed_reaches_the_target_and_a_percent_less_does_not(target: float) -> None:
    slow = plan(peer(20, count=4))

    def reached(bandwidth: float) -> float:
        return forecast(replace(slow, peers=(replace(slow.peers[0], up=bandwidth, down=bandwidth),))).utilisation

    least = least_bandwidth(slow, target)
    assert least is not None
    assert reached(0.99 * least) < target <= reached(least)


def test_what_no_bandwidth_reaches_is_none() -> None:
    assert least_bandwidth(plan(peer(latency=10.0, count=4)), 0.95) is None


# INTELLECT-1 (arXiv 2412.01152, Table 2): 10 B parameters as int8, H = 100 in 38 minutes, links of 0.5 to 4 Gbit/s ----
INNER_SECONDS = 38 * 60 / 100
MEASURED = {"USA": (103.0, 0.957), "USA and Europe": (382.0, 0.856), "global": (469.0, 0.830)}
LLAMA_10B = 42 * 218_112_000 + 1_050_677_248


def intellect(mbit: float, count: int = 14) -> Plan:
    return replace(plan(peer(mbit, INNER_SECONDS, count)), fragments=(LLAMA_10B,))


@pytest.mark.parametrize("region", MEASURED)
def test_utilisation_follows_from_the_all_reduce_that_intellect_measured(region: str) -> None:
    """The links are chosen so that the round takes as long as was measured; the rest is ours."""
    seconds, measured = MEASURED[region]
    transfer = round_of(intellect(1000).peers, LLAMA_10B, 8).transfer
    arithmetic = LLAMA_10B * (1 / QUANTIZED + 1 / STEPPED)
    found = forecast(intellect(1000 * transfer / (seconds - arithmetic)))
    assert found.round_seconds == pytest.approx(seconds)
    assert found.utilisation == pytest.approx(measured, abs=0.002)


def test_intellects_run_over_200_mbit_is_bound_by_computing_only_with_overlap() -> None:
    """Rounds of 850 s as int8 beside 2,280 s of training. A fragment in 4 bits has 114 s; the largest takes 43."""
    alone = replace(intellect(200), bits=8.03)
    assert forecast(alone).utilisation == pytest.approx(0.73, abs=0.01)
    fragments = (3 * 218_112_000,) * 14 + (1_050_677_248,)
    found = forecast(replace(alone, fragments=fragments, overlap=5, bits=4.03))
    assert found.utilisation == pytest.approx(1)
    assert found.round_seconds == pytest.approx(43, abs=1)


def test_intellects_links_allow_about_the_times_that_were_measured() -> None:
    """0.5 to 4 Gbit/s make rounds of 52 to 332 s: 103 s lies within. The two with an ocean between took up to 1.4 times
    as long as the slowest of these links needs: its ring goes over lossy links, and we leave loss out."""
    slowest, fastest = (forecast(intellect(mbit)).round_seconds for mbit in (500, 4000))
    assert fastest < MEASURED["USA"][0] < slowest
    assert all(slowest < seconds < 1.5 * slowest for seconds in (MEASURED["USA and Europe"][0], MEASURED["global"][0]))
    assert [fastest, slowest] == pytest.approx([52, 332], abs=1)


def test_a_link_that_rounds_need_all_of_is_named() -> None:
    """Four peers with 25 Mbit/s were planned to compute for 0.99 of their time with eight bits, and did for 0.68."""
    eight = plan(peer(25, step_seconds=0.5, count=4), inner_steps=28)
    eight = replace(eight, fragments=(3_125_000,) * 8, overlap=5)
    assert forecast(eight).utilisation > 0.95
    assert [line[:8] for line in _warnings(eight, forecast(eight))] == ["too full"]
    for calm in (replace(eight, bits=4), replace(eight, overlap=0)):
        assert _warnings(calm, forecast(calm)) == []


# Thin uplinks ---------------------------------------------------------------------------------------------------------
THINNER = (4.0, 0.25)
FORMATS = ("int8", "e2m1", "sparse")


def thin(up: float, down: float = 200, count: int = 1) -> PeerGroup:
    return PeerGroup("thin", count, up * MBIT, down * MBIT, 0.0, 1.0)


@pytest.mark.parametrize(("up", "format"), [(200, 0), (120, 0), (90, 1), (60, 1), (40, 2), (5, 2)])
def test_a_thin_uplink_sends_the_first_format_that_it_carries_while_the_others_average(up: float, format: int) -> None:
    """No longer than the others' links are taken to be busy: the three of them average for all."""
    found = round_of([thin(up), peer(200, count=3)], VALUES, 8, thinner=THINNER)
    share = (8, *THINNER)[format] / 8
    assert [one.format for one in found.sending] == [format, 0]
    assert found.sending[0].allowed == pytest.approx(LEAST_PAYLOADS * 8e8 / (LINK_SHARE * 200 * MBIT))
    assert found.sending[0].seconds == pytest.approx(share * 8e8 / (LINK_SHARE * up * MBIT))
    assert found.sent[0] == pytest.approx(found.received[0] - 1 + share)
    if format:
        assert found.received[0] == 1, "it reduces nothing"
        assert found.transfer == pytest.approx((1 + 2 / 3) * 8e8 / (LINK_SHARE * 200 * MBIT), rel=0.02)


def test_where_most_links_are_thin_a_round_has_time_for_them() -> None:
    found = round_of([thin(20, count=9), peer(200)], VALUES, 8, thinner=THINNER, timing=Timing(round_timeout=3600.0))
    assert [one.format for one in found.sending] == [0, 0]


def test_half_of_the_overlap_is_time_to_send() -> None:
    usual = round_of([thin(20), peer(200, count=3)], VALUES, 8, thinner=THINNER)
    patient = round_of([thin(20), peer(200, count=3)], VALUES, 8, thinner=THINNER, overlaps=[100.0, 100.0])
    assert [each.sending[0].format for each in (usual, patient)] == [2, 0]
    assert patient.sending[0].allowed == 50.0


def test_a_link_that_carries_no_format_in_time_is_named() -> None:
    narrow = replace(plan(thin(0.1), peer(200, count=3)), formats=FORMATS, thinner=THINNER)
    assert [each.formats for each in forecast(narrow).peers] == [("sparse",), ("int8",)]
    [line] = _warnings(narrow, forecast(narrow))
    assert line.startswith("too thin: the uplink of thin takes 4.39 min for a contribution in sparse, and has 8.42 s: ")
