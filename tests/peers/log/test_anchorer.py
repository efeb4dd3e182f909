"""What an anchor signs, and that it never signs two branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.log.anchorer import ANCHORED, STRETCH, Anchorer, AnchorFileError, CannotAnchorError
from peers.log.folder import MemoryLog
from peers.values.anchors import AnchoredHead, Anchors
from tests.peers.builders import LOG, RUN
from tests.peers.transfer.test_lineage_fetch import Past
from tests.simulator.simulated_keys import SimulatedKeys

VERIFY = SimulatedKeys("any").verify
NOBODY = Anchors(RUN, ("z", "y"))


def anchorer(folder: Path, me: str = "z") -> Anchorer:
    return Anchorer(RUN, me, SimulatedKeys(me), folder, VERIFY)


def signed(past: Past, index: int, by: str = "z") -> AnchoredHead:
    return AnchoredHead.sign(RUN, index, past.logs[index].position.head, by, SimulatedKeys(by))


COMMON = Past(10)
ALONE = Past(5, by="c", after=COMMON)
OTHER = Past(20, name=b"other")


def test_it_signs_the_newest_head_once(tmp_path: Path) -> None:
    it = anchorer(tmp_path)
    assert it.sign(MemoryLog(LOG, 0), NOBODY) is None
    head = it.sign(COMMON.kept(), NOBODY)
    assert head == it.last == signed(COMMON, 10)
    assert it.sign(COMMON.kept(), NOBODY) is None
    assert anchorer(tmp_path).last == head, "it is on the disk"
    assert it.sign(Past(1, after=COMMON).kept(), NOBODY.with_heads([signed(COMMON, 10)])) is not None


def test_it_signs_nothing_that_too_few_have_signed(tmp_path: Path) -> None:
    it = anchorer(tmp_path)
    assert it.sign(ALONE.kept(), NOBODY) == signed(COMMON, 10)
    with pytest.raises(CannotAnchorError, match="entry 10 is not certified: too few have signed it"):
        it.sign(ALONE.kept(), NOBODY)


def test_a_person_may_say_that_it_is_the_run_all_the_same(tmp_path: Path) -> None:
    """From there on the other anchors sign again."""
    head = anchorer(tmp_path / "z").sign(ALONE.kept(), NOBODY, takes_uncertified=True)
    assert head == signed(ALONE, 15)
    longer = Past(2, after=ALONE)
    assert anchorer(tmp_path / "y", "y").sign(longer.kept(), NOBODY.with_heads([head])) == signed(longer, 17, "y")


def test_it_never_signs_two_branches(tmp_path: Path) -> None:
    anchorer(tmp_path).sign(COMMON.kept(), NOBODY)
    with pytest.raises(CannotAnchorError, match="this key has signed another outer step 10"):
        anchorer(tmp_path).sign(OTHER.kept(), NOBODY)
    with pytest.raises(CannotAnchorError, match="it has not come to outer step 10, which this key has signed"):
        anchorer(tmp_path).sign(Past(4).kept(), NOBODY)


def test_what_it_has_signed_elsewhere_binds_it_too(tmp_path: Path) -> None:
    with pytest.raises(CannotAnchorError, match="this key has signed another outer step 7"):
        anchorer(tmp_path).sign(OTHER.kept(), NOBODY.with_heads([signed(COMMON, 7)]))
    assert not (tmp_path / ANCHORED).exists()


def test_it_signs_nothing_that_another_anchor_would_not_have_signed(tmp_path: Path) -> None:
    known = NOBODY.with_heads([signed(COMMON, 7, "y")])
    with pytest.raises(CannotAnchorError, match="the anchor y has signed another outer step 7"):
        anchorer(tmp_path).sign(OTHER.kept(), known)


def test_a_log_that_has_not_come_to_what_a_better_key_has_signed_may_be_another(tmp_path: Path) -> None:
    """Regression: an anchor that had signed nothing yet signed a short false log, and could never sign the run's."""
    known = Anchors(RUN, ("y", "z")).with_heads([signed(COMMON, 7, "y")])
    short = Past(4, name=b"other")
    with pytest.raises(CannotAnchorError, match="it has not come to outer step 7, which y has signed"):
        anchorer(tmp_path).sign(short.kept(), known)
    assert anchorer(tmp_path).sign(COMMON.kept(), known) == signed(COMMON, 10)
    worse = NOBODY.with_heads([signed(COMMON, 7, "y")])
    assert anchorer(tmp_path / "2").sign(short.kept(), worse) == signed(short, 4), "a worse key stops nobody"


def test_a_key_may_overrule_those_after_it(tmp_path: Path) -> None:
    """That another one of them was stolen, a person knows."""
    known = NOBODY.with_heads([signed(COMMON, 7, "y")])
    assert anchorer(tmp_path).sign(OTHER.kept(), known.up_to("z")) == signed(OTHER, 20)


def test_a_key_that_has_lied_signs_nothing_more(tmp_path: Path) -> None:
    known = NOBODY.with_heads([signed(COMMON, 7), signed(OTHER, 7)])
    with pytest.raises(CannotAnchorError, match="nobody believes it any more"):
        anchorer(tmp_path).sign(COMMON.kept(), known)


def test_a_long_log_is_checked_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.log.anchorer.STRETCH", 4)
    assert STRETCH > 4
    it, indices = anchorer(tmp_path), list[int]()
    while (head := it.sign(COMMON.kept(), NOBODY)) is not None:
        indices.append(head.index)
    assert indices == [4, 8, 10]


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_damaged_file_stops_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ANCHORED).write_bytes(content)
    with pytest.raises(AnchorFileError, match="restore it from a copy"):
        anchorer(tmp_path)


def test_a_file_of_another_key_stops_it(tmp_path: Path) -> None:
    anchorer(tmp_path).sign(COMMON.kept(), NOBODY)
    with pytest.raises(AnchorFileError, match="it is of another key or run"):
        anchorer(tmp_path, "y")


def test_nothing_is_said_that_is_not_on_the_disk(tmp_path: Path) -> None:
    it = anchorer(tmp_path / "there")
    (tmp_path / "there").write_text("a file in the way")
    with pytest.raises(AnchorFileError, match="cannot be used"):
        it.sign(COMMON.kept(), NOBODY)
    assert it.last is None
