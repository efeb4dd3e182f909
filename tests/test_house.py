"""A class has one job, and few attributes for it."""

from __future__ import annotations

from tests.house import ATTRIBUTES_AT_MOST, JOIN_TO_BACKWARD, large_classes
from tests.test_layering import ROOT

STILL_LARGE = {
    "peers.presence.presence.Presence",
    "peers.protocol.exchange.Exchange",
    "peers.protocol.gathering.Gathering",
    "peers.protocol.leader.Leader",
    "peers.protocol.replica.Replica",
    "peers.protocol.slot.Slot",
    "peers.protocol.trainer.Trainer",
}
"""Classes that had more attributes when the rule came. The list only shrinks."""


def test_no_further_class_has_many_attributes() -> None:
    assert not large_classes().keys() - STILL_LARGE, f"more than {ATTRIBUTES_AT_MOST} attributes: split by their jobs"


def test_classes_that_have_become_small_leave_the_list() -> None:
    assert not STILL_LARGE - large_classes().keys(), "take them out of STILL_LARGE"


def test_the_way_from_join_to_the_backward_pass_names_files_that_are_there() -> None:
    assert all((ROOT / path).exists() for path in JOIN_TO_BACKWARD)
