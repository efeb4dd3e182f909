"""What a peer promises and holds at one position, alone."""

from __future__ import annotations

import pytest

from peers.presence.election import LATENESS, highest_attempt
from peers.protocol.acceptor import Acceptor
from peers.protocol.messages import Complete
from tests.peers.builders import LOG, PAYLOAD, attempt, member

SIGNATURE = bytes(64)
HEADER = LOG.next_header([member("a", 0, 20)], PAYLOAD)


def pledged() -> Acceptor:
    acceptor = Acceptor()
    assert acceptor.pledge("a")
    return acceptor


def complete(number: int = 1, payload: bytes = PAYLOAD) -> Complete:
    entry = HEADER.digest if payload == PAYLOAD else payload
    return Complete(attempt=attempt(LOG, number), payload=payload, missed=(), entry=entry, signature=SIGNATURE)


def test_a_pledge_to_another_leader_leaves_room_for_what_the_first_may_still_begin() -> None:
    acceptor = pledged()
    assert acceptor.last_attempt == 0
    assert not acceptor.pledge("a")
    assert acceptor.pledge("c")
    assert acceptor.last_attempt == 1


@pytest.mark.parametrize(
    ("sender", "number", "leader", "joins"),
    [
        ("a", 3, "a", True),
        ("a", 2, "a", False),
        ("c", 3, "c", False),
        ("c", 3, "a", False),
        ("a", 3, "c", False),
        ("a", highest_attempt(5.0 + LATENESS), "a", True),
        ("a", highest_attempt(5.0 + LATENESS) + 1, "a", False),
    ],
)
def test_only_a_later_attempt_of_our_leader_is_joined(sender: str, number: int, leader: str, joins: bool) -> None:
    acceptor = pledged()
    acceptor.last_attempt = 2
    assert acceptor.may_join(sender, attempt(LOG, number, leader), seconds=5.0) is joins


def test_what_is_held_is_said_once_to_all_in_each_attempt() -> None:
    acceptor = pledged()
    said, is_new = acceptor.hold(attempt(LOG), HEADER, (), SIGNATURE)
    assert (said, is_new) == (complete(), True)
    assert acceptor.hold(attempt(LOG), HEADER, (), SIGNATURE) == (complete(), False)
    assert acceptor.hold(attempt(LOG, 2), HEADER, (), SIGNATURE)[1]
    assert acceptor.held is not None
    assert acceptor.held.attempt == attempt(LOG, 2)
