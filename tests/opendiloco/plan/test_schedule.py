"""The simulator's graph, on cases that can be computed by hand."""

from __future__ import annotations

import pytest

from opendiloco.plan.bandwidth import bisect, least_bandwidth
from opendiloco.plan.methods import (
    Fragment,
    Method,
    Shape,
    data_parallel,
    diloco,
    equal_spacing,
    exact_cycle,
    streaming,
    strided,
)
from opendiloco.plan.schedule import Exchange, Kind, Node, Simulation, Step, Wire, cycle_seconds, utilisation

TWO_LAYERS = Shape((100, 100))
STEP = Step(2, 1.0)
"""Five seconds: two forward, one for activations, two for parameters."""


def wire(seconds: float) -> Wire:
    """A link that reduces 100 values of 16 bits in so many seconds."""
    return Wire(1600 / seconds)


def test_a_step_has_4_l_minus_1_nodes() -> None:
    nodes: list[Node] = []
    Simulation(Step(24, 1.0), data_parallel(Shape.even(24, 24)), Wire(1e9), nodes).run(1)
    assert len(nodes) == 4 * 24 - 1
    assert not any(node.kind is Kind.ACTIVATIONS and node.layer == 0 for node in nodes)


def test_a_layer_is_reduced_during_the_backward_pass_of_those_before_it() -> None:
    nodes: list[Node] = []
    Simulation(STEP, data_parallel(TWO_LAYERS), wire(2.0), nodes).run(2)
    reductions = [(node.step, node.layer, node.start, node.end) for node in nodes if node.kind is Kind.REDUCTION]
    # The second layer's backward ends at 4; the first layer's at 5, and the link is free at 6.
    assert reductions[:2] == [(1, 1, 4.0, 6.0), (1, 0, 6.0, 8.0)]
    second = [node.start for node in nodes if node.step == 2 and node.kind is Kind.FORWARD]
    assert second == [8.0, 9.0]


def test_diloco_waits_once_in_a_cycle() -> None:
    method = diloco(TWO_LAYERS, 10)
    assert cycle_seconds(STEP, method, wire(2.0)) == pytest.approx(10 * 5 + 3)
    assert utilisation(STEP, method, wire(2.0)) == pytest.approx(50 / 53)


def test_diloco_of_one_inner_step_is_data_parallel() -> None:
    for seconds in (0.1, 1.0, 30.0):
        alike = [
            utilisation(STEP, method, wire(seconds)) for method in (data_parallel(TWO_LAYERS), diloco(TWO_LAYERS, 1))
        ]
        assert alike[0] == alike[1]


def test_overlap_hides_what_takes_no_longer_than_its_steps() -> None:
    def with_overlap(overlap: int) -> float:
        return utilisation(STEP, streaming("", TWO_LAYERS, 20, 1, overlap), wire(12.0))

    # Two reductions of 12 s a cycle. The last layer's may take a second more, that of the first layer's backward; and a
    # second, that of its forward. The first layer's has neither.
    assert with_overlap(0) == pytest.approx(100 / (100 + 12 + 10))
    assert with_overlap(2) == pytest.approx(100 / 102)
    assert with_overlap(3) == pytest.approx(1)


@pytest.mark.parametrize("overlap", [0, 1, 3, 19])
@pytest.mark.parametrize("seconds", [0.5, 7.0, 60.0])
def test_steps_that_only_compute_are_skipped_and_change_nothing(overlap: int, seconds: float) -> None:
    """With nodes to record, none is skipped."""
    for method in (data_parallel(TWO_LAYERS), diloco(TWO_LAYERS, 20), streaming("", TWO_LAYERS, 20, 1, overlap)):
        quick, whole = (Simulation(STEP, method, wire(seconds), nodes) for nodes in (None, list[Node]()))
        for steps in (1, 19, 20, 47):
            quick.run(steps)
            whole.run(steps)
            assert quick.ended == pytest.approx(whole.ended)
            assert quick.steps == whole.steps


def test_the_link_carries_one_reduction_after_another() -> None:
    busy = streaming("", TWO_LAYERS, 2, 1, overlap=1)
    assert cycle_seconds(STEP, busy, wire(30.0)) == pytest.approx(60)


def test_what_is_there_first_makes_nothing_else_come_sooner() -> None:
    """Two reductions of one step, of which the first takes ten seconds more after it has had the link."""

    class Lagging:
        def exchanges(self, place: int, fragment: Fragment, bits: float) -> list[Exchange]:
            return [Exchange(after=0, before=0, seconds=1.0, lag=(10.0, 0.0)[place])]

    each_step = Method("", (Fragment((0,), 1), Fragment((1,), 1)), (1, 1), 1)
    assert cycle_seconds(STEP, each_step, Lagging()) == pytest.approx(STEP.seconds + 11)


def test_fragments_are_interleaved_and_hold_all_values() -> None:
    fragments = strided(Shape((1, 2, 3, 4, 5), rest=7), 2)
    assert fragments == (Fragment((0, 3), 5), Fragment((1, 4), 7), Fragment((2,), 3), Fragment((), 7))
    assert sum(fragment.values for fragment in fragments) == Shape((1, 2, 3, 4, 5), rest=7).values == 22


@pytest.mark.parametrize(("fragments", "spacing"), [(8, 12), (16, 6), (36, 3)])
def test_the_papers_spacing_is_a_whole_number_of_steps(fragments: int, spacing: int) -> None:
    ends, cycle = equal_spacing(100, fragments)
    assert ends[:2] == (spacing, 2 * spacing)
    assert cycle == spacing * fragments


def test_an_exact_cycle_has_all_its_inner_steps() -> None:
    assert exact_cycle(100, 8) == ((13, 25, 38, 50, 63, 75, 88, 100), 100)


def test_even_shapes_lose_no_value() -> None:
    assert Shape.even(3, 10).values == 10


def test_least_bandwidth_reaches_the_target_and_no_more() -> None:
    least = least_bandwidth(STEP, diloco(Shape((10**8, 10**8)), 10), 50 / 53)
    assert least == pytest.approx(16e8 / 2, rel=1e-4)


def test_what_cannot_be_reached_is_none() -> None:
    assert bisect(lambda value: False, 1.0, 2.0) is None
