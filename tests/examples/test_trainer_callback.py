from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "trainer_callback.py"


def test_a_folder_without_text_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a long enough text of another kind")
    with pytest.raises(SystemExit, match=r"--text .*: its \.txt files have 0 bytes; one window needs 8"):
        runpy.run_path(str(SCRIPT))["Text"](tmp_path, 8)
