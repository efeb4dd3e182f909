"""Builds the source distribution and, from it, a wheel for each kind of Linux: `python -m native.wheels dist`.

zig's C compiler brings the declarations of old versions of glibc along, for every processor: the wheels run on systems
that are older than the one that built them. auditwheel says whether they do. With `--try`, the source distribution and
this machine's wheel are each installed into a fresh virtual environment, without torch, and the kernels are tested.

Needs the packages build, ziglang, auditwheel, and what pyproject.toml asks for to build.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROCESSORS = "x86_64", "aarch64"
GLIBC = 2, 17
"""The oldest version for which a wheel claims to work: manylinux2014's."""

# What git does not track is not source.
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "kernels-check*", "tests"
)
LIGHT_REQUIREMENTS = ROOT / "docker" / "bootstrap-requirements.txt"
BASE = re.compile(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"')


class WheelError(Exception):
    """A wheel that cannot be built, or that is not what its name says."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m native.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder for what is built")
    parser.add_argument("--try", dest="is_tried", action="store_true", help="install it into fresh environments, too")
    arguments = parser.parse_args()
    try:
        built = build_all(arguments.out.resolve())
        if arguments.is_tried:
            own = f"_{platform.machine()}."
            try_packages([package for package in built if package.suffix != ".whl" or own in package.name])
    except WheelError as error:
        sys.exit(f"error: {error}")


def build_all(out: Path) -> list[Path]:
    """Return the paths of the source distribution and of the wheels, each of which was checked. Raises: WheelError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=NOT_SOURCE)
        [source] = build(checkout, out, "--sdist")
        built = [source]
        for processor in PROCESSORS:
            with tarfile.open(source) as archive:  # anew for each, lest one has what was compiled for another
                archive.extractall(Path(folder) / processor, filter="data")
            [unpacked] = (Path(folder) / processor).iterdir()
            tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
            built += build(
                unpacked, out, "--wheel", f"-C--build-option=--plat-name={tag}", environment=compiler(processor)
            )
            check(built[-1], processor)
    return built


def compiler(processor: str) -> dict[str, str]:
    """Return the environment variables that make setuptools compile for a processor."""
    command = f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    return {"CC": command, "LDSHARED": f"{command} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{processor}"}


def build(source: Path, out: Path, *options: str, environment: Mapping[str, str] | None = None) -> list[Path]:
    """Return what was built into `out` from the sources in a folder. Raises: WheelError."""
    with tempfile.TemporaryDirectory() as fresh:
        command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", fresh, str(source)]
        run(command, environment)
        return [Path(shutil.copy(path, out)) for path in Path(fresh).iterdir()]


def check(wheel: Path, processor: str) -> None:
    """Raises: WheelError when a wheel's machine code needs another processor, or a newer system, than its name says."""
    said = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    needs = platform_of(said)
    if needs is None or needs[1] != processor or needs[0] > GLIBC:
        raise WheelError(f"{wheel.name} is not what its name says. auditwheel: {said}")
    print(f"{wheel.name}: needs glibc {needs[0][0]}.{needs[0][1]} on {processor}, or newer")


def platform_of(said: str) -> tuple[tuple[int, int], str] | None:
    """Return the version of glibc and the processor that auditwheel names, or None where it names none."""
    match = BASE.search(" ".join(said.split()))
    return match and ((int(match[1]), int(match[2])), match[3])


def try_packages(packages: Sequence[Path]) -> None:
    """Install each into a fresh environment. Raises: WheelError where the kernels of one differ from another's."""
    kernels = {package.name: try_package(package) for package in packages}
    print("\n".join(f"{name}: {found}" for name, found in kernels.items()))
    if len(set(kernels.values())) > 1:
        raise WheelError("the compilers do not find the same instruction sets on this machine.")


def try_package(package: Path) -> str:
    """Return which kernels an installed package has and uses, which were tested. Raises: WheelError."""
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "venv", folder])
        binaries = Path(folder) / "bin"
        pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        run([*pip, "--requirement", str(LIGHT_REQUIREMENTS), str(package)])
        run([str(binaries / "diloco-peer"), "--version"], folder=folder)
        return run([str(binaries / "python"), "-m", "opendiloco.kernels"], folder=folder).splitlines()[0]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: str | None = None) -> str:
    """Return what a command has printed. Raises: WheelError when it fails."""
    variables = os.environ | (environment or {})
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder)
    if done.returncode != 0:
        raise WheelError(f"{' '.join(command[:5])} … failed: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
