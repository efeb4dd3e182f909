"""The folder for a model: made first, and gone again if there is nothing to put into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendiloco.errors import MachineError
from opendiloco.follower import new_folder


def test_it_is_there_before_the_work_begins(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new" / "model"):
        assert list((tmp_path / "new" / "model").iterdir()) == []
    assert (tmp_path / "new" / "model").is_dir()


def test_work_that_fails_leaves_only_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "new" / "model"):
        with pytest.raises(ZeroDivisionError), new_folder(folder):
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_work_that_fails_half_way_leaves_what_it_wrote(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "model" / "weights").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model"):
        work()
    assert (tmp_path / "model" / "weights").exists()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder, cause in ((tmp_path, "is not empty"), (Path("/proc/model"), "cannot be used")):
        with pytest.raises(MachineError, match=cause) as caught, new_folder(folder):
            pytest.fail("it was said to be usable")
        assert caught.value.exit_code == 6
        assert "--out" in caught.value.remedy
