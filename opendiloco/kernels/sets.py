"""Which instruction set does the work. By default the fastest that this processor has; the results are the same."""

from __future__ import annotations

from opendiloco._kernels import ffi, lib
from opendiloco.errors import MachineError

ENVIRONMENT_VARIABLE = "DILOCO_KERNELS"
KERNEL_SETS = ("scalar", "avx2", "avx512", "neon")


def supported_kernels() -> tuple[str, ...]:
    """The sets that this processor and this build have."""
    return tuple(name for name in KERNEL_SETS if lib.diloco_kernels_are_supported(name.encode()))


def chosen_kernels() -> str:
    """The set that operations use."""
    return ffi.string(lib.diloco_kernels_name()).decode()


def choose_kernels(name: str) -> None:
    """Use a set from now on, in the whole process; "" is the fastest. Raises: MachineError."""
    if name and name not in supported_kernels():
        known = "this machine does not have it" if name in KERNEL_SETS else "there is no such set"
        choices = ", ".join(supported_kernels())
        raise MachineError(
            f"{ENVIRONMENT_VARIABLE} = {name!r}: {known}.", f"Unset it for the fastest, or use one of: {choices}."
        )
    lib.diloco_choose_kernels(name.encode())
