"""The builder of a source distribution and of a wheel for each kind of Linux: `python -m native.wheels dist`.

zig's C compiler includes the declarations of old versions of glibc for every processor. The wheels therefore run on
systems older than the one that built them, and auditwheel checks this. With `--try`, the source distribution and this
machine's wheel are each installed into a fresh virtual environment without torch, and the kernels are tested.

It needs the packages build, ziglang and auditwheel, and the build requirements of pyproject.toml.
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
"""The oldest version of glibc for which a wheel claims to work, manylinux2014's."""

# Files to omit from the copied sources: those that git does not track, and the tests, which wheels do not need.
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "kernels-check*", "tests"
)
LIGHT_REQUIREMENTS = ROOT / "docker" / "bootstrap-requirements.txt"
BASE = re.compile(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"')


class WheelError(Exception):
    """The error for a package that cannot be built or tested, or for a wheel that does not match its name."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m native.wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder for the built files")
    parser.add_argument("--try", dest="is_tried", action="store_true", help="also install them into fresh environments")
    arguments = parser.parse_args()
    try:
        built = build_all(arguments.out.resolve())
        if arguments.is_tried:
            own = f"_{platform.machine()}."
            try_packages([package for package in built if package.suffix != ".whl" or own in package.name])
    except WheelError as error:
        sys.exit(f"error: {error}")


def build_all(out: Path) -> list[Path]:
    """Build the source distribution and the wheels into `out`, and check the wheels. Return the paths of the built
    files. Raises: WheelError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=NOT_SOURCE)
        [source] = build(checkout, out, "--sdist")
        built = [source]
        for processor in PROCESSORS:
            with tarfile.open(source) as archive:  # new sources for each processor, without another's compiled files
                archive.extractall(Path(folder) / processor, filter="data")
            [unpacked] = (Path(folder) / processor).iterdir()
            tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
            built += build(
                unpacked, out, "--wheel", f"-C--build-option=--plat-name={tag}", environment=compiler(processor)
            )
            check(built[-1], processor)
    return built


def compiler(processor: str) -> dict[str, str]:
    """Return the environment variables with which setuptools uses zig to compile for a processor."""
    command = f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    return {"CC": command, "LDSHARED": f"{command} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{processor}"}


def build(source: Path, out: Path, *options: str, environment: Mapping[str, str] | None = None) -> list[Path]:
    """Build packages from the sources in the folder `source` into the folder `out`. Return the paths of the built
    files. Raises: WheelError."""
    with tempfile.TemporaryDirectory() as fresh:
        command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", fresh, str(source)]
        run(command, environment)
        return [Path(shutil.copy(path, out)) for path in Path(fresh).iterdir()]


def check(wheel: Path, processor: str) -> None:
    """Raise WheelError if a wheel's machine code needs another processor, or a newer glibc, than the wheel's name
    promises."""
    audit = run([sys.executable, "-m", "auditwheel", "show", str(wheel)])
    needs = platform_of(audit)
    if needs is None or needs[1] != processor or needs[0] > GLIBC:
        raise WheelError(f"{wheel.name} does not match its name. auditwheel: {audit}")
    print(f"{wheel.name}: needs glibc {needs[0][0]}.{needs[0][1]} on {processor}, or newer")


def platform_of(audit: str) -> tuple[tuple[int, int], str] | None:
    """Return the version of glibc and the processor that auditwheel's output names; None if the output names none."""
    match = BASE.search(" ".join(audit.split()))
    return match and ((int(match[1]), int(match[2])), match[3])


def try_packages(packages: Sequence[Path]) -> None:
    """Install each package into a fresh environment, and print its kernels' instruction sets. Raises: WheelError if
    these differ between packages."""
    kernels = {package.name: try_package(package) for package in packages}
    print("\n".join(f"{name}: {found}" for name, found in kernels.items()))
    if len(set(kernels.values())) > 1:
        raise WheelError("the compilers do not find the same instruction sets on this machine.")


def try_package(package: Path) -> str:
    """Install a package into a fresh environment, and test its kernels. Return the line with the instruction sets that
    they use and support. Raises: WheelError."""
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "venv", folder])
        binaries = Path(folder) / "bin"
        pip = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        run([*pip, "--requirement", str(LIGHT_REQUIREMENTS), str(package)])
        run([str(binaries / "diloco-peer"), "--version"], folder=folder)
        return run([str(binaries / "python"), "-m", "opendiloco.kernels"], folder=folder).splitlines()[0]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: str | None = None) -> str:
    """Run a command, and return its standard output. Raises: WheelError if the command fails."""
    variables = os.environ | (environment or {})
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder)
    if done.returncode != 0:
        raise WheelError(f"{' '.join(command[:5])} … failed: {(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
