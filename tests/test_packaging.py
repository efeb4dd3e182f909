"""What a source distribution and the wheel built from it contain."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What git wouldn't track, and tests: neither goes into a source distribution.
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "kernels-check*", "tests"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution, made from a copy of the checkout, and a wheel that was built from that."""
    copy, out = tmp_path_factory.mktemp("checkout") / "diloco-peer", tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, copy, ignore=NOT_SOURCE)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [wheel] = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read("diloco_peer-0.1.0.dist-info/METADATA").decode())


@pytest.mark.thorough
def test_one_wheel_serves_all_python_versions(wheel: Path) -> None:
    assert wheel.name.startswith("diloco_peer-0.1.0-cp311-abi3-")


def test_source_distribution_has_what_the_build_needs(built: Path) -> None:
    with tarfile.open(built / "diloco_peer-0.1.0.tar.gz") as archive:
        names = {name.removeprefix("diloco_peer-0.1.0/") for name in archive.getnames()}
    needed = {"setup.py", "setup.cfg", "pyproject.toml", "LICENSE"}
    needed |= {str(path.relative_to(ROOT)) for path in (ROOT / "native").rglob("*.[ch]")}
    needed |= {"native/build_kernels.py", "native/Makefile", "native/check/golden.txt"}
    assert needed <= names


def test_wheel_has_the_compiled_kernels_and_the_types(wheel_names: list[str]) -> None:
    needed = {"opendiloco/_kernels.abi3.so", "opendiloco/_kernels.pyi", "opendiloco/py.typed", "peers/py.typed"}
    assert needed <= set(wheel_names)


def test_wheel_has_the_page_of_the_dashboard(wheel_names: list[str]) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "opendiloco" / "dashboard" / "static").iterdir()}
    assert len(files) == 6
    assert files <= set(wheel_names)


def test_wheel_has_every_module(wheel_names: list[str]) -> None:
    modules = {
        str(path.relative_to(ROOT)) for package in ("opendiloco", "peers") for path in ROOT.glob(f"{package}/**/*.py")
    }
    assert modules <= set(wheel_names)


def test_wheel_installs_only_our_two_packages(wheel_names: list[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names} == {"opendiloco", "peers", "diloco_peer-0.1.0.dist-info"}


def test_wheel_runs_from_its_archive_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import opendiloco, opendiloco.kernels as k; print(opendiloco.__file__, k.INT8.payload_size(1025))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "opendiloco" / "__init__.py"), "1033"], done.stderr


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "diloco-peer"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split(">=")[0] for line in required} >= {"torch", "hivemind", "transformers", "datasets", "cffi"}
    assert "tokenizers" in {line.split(">=")[0] for line in required}  # imported by name, whatever transformers needs


def test_console_script(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read("diloco_peer-0.1.0.dist-info/entry_points.txt").decode()
    assert "diloco-peer = opendiloco.cli:main" in entry_points
