"""`diloco-peer kernels`: which instruction set does the arithmetic, and a self-test."""

from __future__ import annotations

import click


@click.command(short_help="Test the C kernels, and measure their speed.")
@click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="Threads of the speed test.")
def command(threads: int) -> None:
    """Show which instruction set the kernels use, test it against the reference, and measure its speed."""
    from opendiloco import kernels
    from opendiloco.errors import MachineError
    from opendiloco.kernels.self_test import differing_sets, measure_speeds

    supported = ", ".join(kernels.supported_kernels())
    click.echo(f"kernels: {kernels.chosen_kernels()} (this machine has: {supported})")
    differing = differing_sets()
    if differing:
        raise MachineError(
            f"the kernels {', '.join(differing)} don't give the reference's bits here.",
            "Set DILOCO_KERNELS=scalar, and report this with the processor's name: it's a bug.",
        )
    click.echo("all sets give the same bits in every format")
    click.echo(f"int8, {threads} thread{'s' * (threads > 1)}:")
    for speed in measure_speeds(threads):
        click.echo(f"  {speed.operation:<12}{speed.gigabytes_per_second:7.1f} GB/s")
