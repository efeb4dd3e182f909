from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

from opendiloco import shared_memory
from opendiloco.errors import MachineError
from opendiloco.shared_memory import (
    SharedVectors,
    available_memory,
    cap_memory,
    check_available,
    create_memory_file,
    reserve,
)


def test_two_mappings_of_one_file_see_the_same_values() -> None:
    descriptor = create_memory_file()
    reserve(descriptor, 5)
    ours, theirs = SharedVectors(descriptor, 5), SharedVectors(descriptor, 5)
    os.close(descriptor)
    ours.theta[:] = 1
    theirs.local[:] = 2
    assert theirs.theta.tolist() == [1] * 5
    assert ours.local.tolist() == [2] * 5


def test_nothing_is_left_behind_when_the_last_view_is_gone() -> None:
    gc.collect()  # what earlier tests have left
    named_before, mapped_before = set(Path("/dev/shm").iterdir()), mapped_vectors()
    descriptor = create_memory_file()
    reserve(descriptor, 1000)
    vectors = SharedVectors(descriptor, 1000)
    os.close(descriptor)
    assert mapped_vectors() == mapped_before + 1
    assert not {path for path in set(Path("/dev/shm").iterdir()) - named_before if "diloco" in path.name}
    del vectors
    gc.collect()
    assert mapped_vectors() == mapped_before


def mapped_vectors() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:diloco-peer")


def test_too_little_memory_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 5 * 2**20)
    descriptor = create_memory_file()
    try:
        with pytest.raises(MachineError, match="shared vectors: 8 MiB are needed, 5 MiB are free") as caught:
            reserve(descriptor, 2**20)
        assert os.fstat(descriptor).st_size == 0
    finally:
        os.close(descriptor)
    assert caught.value.exit_code == 6
    assert caught.value.remedy


def test_a_system_that_refuses_is_quoted() -> None:
    read_only = os.open("/dev/null", os.O_RDONLY)
    try:
        with pytest.raises(MachineError, match="1 MiB of shared memory cannot be allocated"):
            reserve(read_only, 2**17)
    finally:
        os.close(read_only)


@pytest.mark.parametrize(("limit", "free"), [("4194304", 2621440), ("max", None)])
def test_a_containers_page_cache_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, free: int | None
) -> None:
    """Of 4 MiB, 3.5 are in use, 2 of them for files."""
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("3670016\n")
    (tmp_path / "memory.stat").write_text("anon 1572864\nfile 2097152\nactive_file 524288\ninactive_file 1572864\n")
    monkeypatch.setattr(shared_memory, "CGROUP", tmp_path)
    assert available_memory() == free if free else available_memory() > 2**23


def test_available_memory_is_plausible() -> None:
    assert 2**20 < available_memory() < 2**50


@pytest.fixture
def uncapped() -> Iterator[None]:
    yield
    cap_memory(None)


@pytest.mark.usefixtures("uncapped")
def test_an_owner_gives_no_more_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    cap_memory(2**60)
    assert 0 < available_memory() < 2**60
    cap_memory(1)
    assert available_memory() == 0
    with pytest.raises(MachineError, match="anything: 0 MiB are needed"):
        check_available("anything", 1)
    monkeypatch.setattr(shared_memory, "_used_by_family", lambda: 320 * 2**20)
    with pytest.raises(MachineError) as caught:
        check_available("anything", 133 * 2**20)
    assert "uses 320 MiB: raise --max-memory to 0.5 or more, or leave it out" in caught.value.remedy


@pytest.mark.usefixtures("uncapped")
def test_what_descendants_use_counts_against_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that takes 100 MB, and says so."""
    program = "import sys; taken = bytearray(b'x') * 100_000_000; print(flush=True); sys.stdin.read()"
    monkeypatch.setattr(shared_memory, "_free_memory", lambda: 2**60)
    cap_memory(2**60)
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        left = available_memory()
        child.kill()
        child.wait()
        assert available_memory() - left > 90_000_000
