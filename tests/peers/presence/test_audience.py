"""The peers that are beaten to."""

from __future__ import annotations

from peers.presence.beats import AUDIENCE_LIMIT, NEW_AT_ONCE, PAUSE_LAST, Audience

CROWD = [f"peer{number}" for number in range(3 * AUDIENCE_LIMIT)]


def chosen(others: list[str], voters: tuple[str, ...] = ()) -> Audience:
    audience = Audience()
    audience.choose(others, voters)
    return audience


def test_up_to_128_are_all_told() -> None:
    assert chosen(CROWD[:AUDIENCE_LIMIT], (CROWD[0],)).peers == set(CROWD[:AUDIENCE_LIMIT])


def test_of_more_the_voters_come_first_and_then_who_has_been_known_for_longest() -> None:
    voters = tuple(CROWD[-100:])
    assert chosen(CROWD, (*voters, "gone")).peers == {*voters, *CROWD[:28]}


def test_a_flood_of_made_up_peers_displaces_nobody() -> None:
    audience = chosen(CROWD[:20], (CROWD[19],))
    audience.choose([*CROWD[:20], *(f"made up {number}" for number in range(10_000))], (CROWD[19],))
    assert audience.peers >= set(CROWD[:20])
    assert audience.due(0.0) == [CROWD[19], *CROWD[:19], *(f"made up {number}" for number in range(NEW_AT_ONCE - 20))]


def test_those_that_do_not_answer_make_room_for_others() -> None:
    """A newcomer may find more made-up peers than others."""
    others = [*(f"made up {number}" for number in range(300)), "honest"]
    audience, looks = chosen(others), 0
    while "honest" not in audience.due(float(looks)):
        for peer in audience.due(float(looks)):
            audience.begins(peer)
            audience.failed(peer, float(looks))
        looks += 1
        audience.choose(others, ())
    assert looks <= 6


def test_only_so_many_are_told_something_first_at_once() -> None:
    audience = chosen(CROWD[:AUDIENCE_LIMIT])
    first = audience.due(0.0)
    assert len(first) == NEW_AT_ONCE
    for peer in first:
        audience.begins(peer)
    assert audience.due(0.0) == []
    for peer in first:
        audience.answered(peer, 5, wants=False)
    assert audience.due(0.0) == CROWD[:AUDIENCE_LIMIT]


def test_whoever_does_not_answer_is_left_alone_for_longer_each_time() -> None:
    audience, now, pauses = chosen(["a"]), 0.0, []
    for _ in range(8):
        audience.begins("a")
        assert audience.due(now) == [], "it is being told something"
        audience.failed("a", now)
        began = now
        while not audience.due(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_LAST, PAUSE_LAST, PAUSE_LAST]
    audience.failed("a", now)
    audience.end_pause("a")
    assert audience.due(now) == ["a"], "it has spoken to us"
    audience.begins("a")
    audience.answered("a", None, wants=False)
    audience.failed("a", now)
    assert audience.due(now + 1.0) == ["a"], "an answer makes up for all failures"


def test_a_peer_has_what_it_has_confirmed() -> None:
    audience = chosen(["a"])
    assert not audience.has("a", 5)
    audience.answered("a", 5, wants=False)
    assert audience.has("a", 5)
    assert not audience.has("a", 6)
    audience.answered("a", None, wants=False)
    assert audience.has("a", 5)
    audience.answered("a", None, wants=True)
    assert not audience.has("a", 5)
    audience.answered("a", 5, wants=False)
    audience.failed("a", 0.0)
    assert not audience.has("a", 5), "it may have started anew"


def test_nothing_is_remembered_of_those_that_are_gone() -> None:
    audience = chosen(CROWD[:100])
    for peer in CROWD:
        audience.answered(peer, 5, wants=False)
        audience.failed(peer, 0.0)
    audience.choose(["new"], ())
    assert (audience._confirmed, audience._call_pauses, audience._under_way) == ({}, {}, set())
