"""Which entries that too few have signed a follower believes."""

from __future__ import annotations

import pytest

from peers.log.certificate import Support
from peers.log.lineage import UNSUPPORTED
from peers.presence.heartbeat import Heartbeat
from peers.transfer import following
from peers.transfer.following import UncertifiedWait
from tests.peers.heartbeats import beat
from tests.peers.logs import CERTIFIED, PAYLOAD, first_log, next_header

GRACE = 60.0
LOG = first_log()
NEXT = LOG.append(next_header(LOG, [LOG.expected(peer) for peer in "abc"], PAYLOAD))


def follows(beats: list[Heartbeat], support: Support, waited: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    time = iter((0.0, 0.0, waited, waited))
    monkeypatch.setattr(following, "now", lambda: next(time))
    one = UncertifiedWait(GRACE)
    return one.may_follow(LOG, support, beats) or one.may_follow(LOG, support, beats)


@pytest.mark.parametrize(
    ("beats", "is_followed"),
    [
        ([beat("a", LOG), beat("b", LOG), beat("stranger", NEXT)], False),
        ([beat("a", LOG), beat("b", NEXT)], True),
        ([beat("a", LOG), beat("b", LOG, incarnation=7), beat("stranger", LOG)], True),
        ([], True),
    ],
)
def test_no_entry_of_a_minority_is_followed_while_most_are_here_to_make_one(
    beats: list[Heartbeat], is_followed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: whoever put one there led followers and archives astray in each training longer than the grace."""
    assert follows(beats, UNSUPPORTED, GRACE, monkeypatch) == is_followed
    assert not follows(beats, UNSUPPORTED, GRACE - 1, monkeypatch)
    assert follows(beats, CERTIFIED, 0.0, monkeypatch)
    assert not caplog.records, "a person need not act: nothing is a warning"
