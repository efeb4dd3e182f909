"""`diloco-peer sample`: what the run's model writes."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import Place, data_option, place_options, state_at
from opendiloco.workers.options import TEMPERATURE


@click.command(short_help="Print how the run's model continues a prompt.")
@place_options
@click.option(
    "--tokens",
    type=click.IntRange(1, 100_000),
    metavar="N",
    default=100,
    show_default=True,
    help="Write N tokens at most.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 100),
    metavar="T",
    default=TEMPERATURE,
    show_default=True,
    help="Above 1 more surprising, below 1 less; 0: always the likeliest token.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    metavar="N",
    default=0,
    show_default=True,
    help="Begin the first sample with this seed; each other one with the next.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 1000),
    metavar="N",
    default=1,
    show_default=True,
    help="Write N samples.",
)
@data_option("Open the run's text in this folder.")
@click.argument("prompt")
@click.pass_obj
def command(
    log: LogOptions,
    place: Place,
    tokens: int,
    temperature: float,
    seed: int,
    samples: int,
    data: tuple[Path, ...],
    prompt: str,
) -> None:
    """Print how the run's model, as its peers or a checkpoint have it, continues PROMPT.

    The same state, prompt and seed give the same text on one machine.
    """
    import asyncio

    place.check()
    log.start()

    async def write() -> None:
        async with state_at(place, data) as (_, past, workload):
            click.echo(f"after {past.outer_steps} outer steps:", err=True)
            for number in range(samples):
                click.echo(prompt + await workload.trainer.generate(prompt, tokens, seed + number, temperature))

    asyncio.run(write())
