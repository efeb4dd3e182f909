"""The command `python -m opendiloco.kernels`, which shows the instruction set that the kernels use, tests the kernels
and measures their speed."""

from __future__ import annotations

import argparse
import sys

from opendiloco import kernels


def main(arguments: list[str] | None = None) -> None:
    """Show which instruction set the kernels use, test all sets against the scalar one, and measure the speed."""
    parser = argparse.ArgumentParser(prog="python -m opendiloco.kernels", description=main.__doc__)
    parser.add_argument("--threads", type=int, choices=range(1, 65), default=1, metavar="N", help="for the speed test")
    threads = parser.parse_args(arguments).threads
    supported = ", ".join(kernels.supported_kernels())
    print(f"kernels: {kernels.chosen_kernels()} (this machine has: {supported})")
    differing = kernels.differing_sets()
    if differing:
        sys.exit(
            f"error: the kernels {', '.join(differing)} don't give the reference's bits here. "
            "Set DILOCO_KERNELS=scalar, and report this with the processor's name: a bug or broken hardware."
        )
    print("all sets give the same bits in every format")
    print(f"int8, {threads} thread{'s' * (threads > 1)}:")
    for operation, speed in kernels.measure_speeds(threads).items():
        print(f"  {operation:<12}{speed:7.1f} GB/s")


if __name__ == "__main__":
    main()
