"""Files are there whole, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from peers.values.system import write_whole


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_durable: bool
) -> None:
    path = tmp_path / "file"
    write_whole(path, [b"ol", b"d"], is_durable)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, [b"new"], is_durable)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
