"""What an archive signs, and that it never signs two branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.log.folder import RunLog
from peers.log.head_signer import SIGNED, STRETCH, CannotSignError, HeadSigner, SignedFileError
from peers.values.signed_heads import SignedHead, SignedHeads
from tests.peers.logs import LOG, RUN
from tests.peers.transfer.test_lineage_fetch import Past
from tests.simulator.simulated_keys import SimulatedKeys

NOBODY = SignedHeads(RUN, ("z", "y"))


def signer(folder: Path, me: str = "z") -> HeadSigner:
    return HeadSigner(RUN, me, SimulatedKeys(me), folder)


def signed(past: Past, index: int, by: str = "z") -> SignedHead:
    return SignedHead.sign(RUN, index, past.logs[index].position.head, by, SimulatedKeys(by))


COMMON = Past(10)
ALONE = Past(5, by="c", after=COMMON)
OTHER = Past(20, name=b"other")


def test_it_signs_the_newest_head_once(tmp_path: Path) -> None:
    it = signer(tmp_path)
    assert it.sign(RunLog(LOG, 0), NOBODY) is None
    head = it.sign(COMMON.kept(), NOBODY)
    assert head == it.last == signed(COMMON, 10)
    assert it.sign(COMMON.kept(), NOBODY) is None
    assert signer(tmp_path).last == head, "it is on the disk"
    assert it.sign(Past(1, after=COMMON).kept(), NOBODY.with_heads([signed(COMMON, 10)])) is not None


def test_it_signs_nothing_that_no_quorum_has_signed(tmp_path: Path) -> None:
    it = signer(tmp_path)
    assert it.sign(ALONE.kept(), NOBODY) == signed(COMMON, 10)
    with pytest.raises(CannotSignError, match="entry 10 is not certified: no quorum has signed it"):
        it.sign(ALONE.kept(), NOBODY)


def test_it_never_signs_two_branches(tmp_path: Path) -> None:
    signer(tmp_path).sign(COMMON.kept(), NOBODY)
    with pytest.raises(CannotSignError, match="this key has signed another outer step 10"):
        signer(tmp_path).sign(OTHER.kept(), NOBODY)
    with pytest.raises(CannotSignError, match="it ends before outer step 10, which this key has signed"):
        signer(tmp_path).sign(Past(4).kept(), NOBODY)


def test_what_it_has_signed_elsewhere_binds_it_too(tmp_path: Path) -> None:
    with pytest.raises(CannotSignError, match="this key has signed another outer step 7"):
        signer(tmp_path).sign(OTHER.kept(), NOBODY.with_heads([signed(COMMON, 7)]))
    assert not (tmp_path / SIGNED).exists()


def test_it_signs_nothing_that_another_archive_would_not_have_signed(tmp_path: Path) -> None:
    known = NOBODY.with_heads([signed(COMMON, 7, "y")])
    with pytest.raises(CannotSignError, match="the archive y has signed another outer step 7"):
        signer(tmp_path).sign(OTHER.kept(), known)


def test_a_log_that_has_not_come_to_what_is_signed_may_be_another(tmp_path: Path) -> None:
    """Regression: an archive that had signed nothing yet signed a short false log, and could never sign the run's."""
    known = NOBODY.with_heads([signed(COMMON, 7, "y")])
    with pytest.raises(CannotSignError, match="it ends before outer step 7, which y has signed"):
        signer(tmp_path).sign(Past(4, name=b"other").kept(), known)
    assert signer(tmp_path).sign(COMMON.kept(), known) == signed(COMMON, 10)


def test_it_contradicts_another_key_where_that_has_signed_another_log(tmp_path: Path) -> None:
    """So that everybody sees it, and believes neither from there on."""
    it = signer(tmp_path)
    assert it.sign(COMMON.kept(), NOBODY) == signed(COMMON, 10)
    known = NOBODY.with_heads([signed(COMMON, 10), signed(OTHER, 7, "y")])
    head = it.sign(COMMON.kept(), known)
    assert head == signed(COMMON, 7)
    assert it.last == signer(tmp_path).last == signed(COMMON, 10), "which binds it as before"
    known = known.with_heads([head])
    assert known.disbelieved == {"y": 7, "z": 7}
    with pytest.raises(CannotSignError, match="this key does not count any more: outer step 7 is signed twice"):
        it.sign(COMMON.kept(), known)


def test_what_it_contradicts_another_key_with_is_certified(tmp_path: Path) -> None:
    it = signer(tmp_path)
    assert it.sign(ALONE.kept(), NOBODY) == signed(COMMON, 10)
    with pytest.raises(CannotSignError, match="entry 10 is not certified"):
        it.sign(ALONE.kept(), NOBODY.with_heads([signed(OTHER, 12, "y")]))
    longer = Past(5, after=COMMON)
    known = NOBODY.with_heads([signed(COMMON, 10), signed(OTHER, 12, "y")])
    assert it.sign(longer.kept(), known) == it.last == signed(longer, 12)


def test_a_key_that_has_lied_signs_nothing_more(tmp_path: Path) -> None:
    known = NOBODY.with_heads([signed(COMMON, 7), signed(OTHER, 7)])
    with pytest.raises(CannotSignError, match="this key does not count any more"):
        signer(tmp_path).sign(COMMON.kept(), known)


def test_a_long_log_is_checked_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.log.head_signer.STRETCH", 4)
    assert STRETCH > 4
    it, indices = signer(tmp_path), list[int]()
    while (head := it.sign(COMMON.kept(), NOBODY)) is not None:
        indices.append(head.index)
    assert indices == [4, 8, 10]


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_damaged_file_stops_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SIGNED).write_bytes(content)
    with pytest.raises(SignedFileError, match="restore it from a copy"):
        signer(tmp_path)


def test_a_file_of_another_key_stops_it(tmp_path: Path) -> None:
    signer(tmp_path).sign(COMMON.kept(), NOBODY)
    with pytest.raises(SignedFileError, match="it is for another key or run"):
        signer(tmp_path, "y")


def test_nothing_is_said_that_is_not_on_the_disk(tmp_path: Path) -> None:
    it = signer(tmp_path / "there")
    (tmp_path / "there").write_text("a file in the way")
    with pytest.raises(SignedFileError, match="cannot be used"):
        it.sign(COMMON.kept(), NOBODY)
    assert it.last is None
