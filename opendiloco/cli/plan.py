"""`diloco-peer plan`: what a run would come to with given machines and links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE

if TYPE_CHECKING:
    from opendiloco.plan.comparison import Settings
    from opendiloco.plan.forecast import Plan
    from opendiloco.plan.report import Memory

FRAGMENT_LAYERS, OVERLAP = 3, 5
"""As arXiv 2501.18512 has the one, and advises at most for the other."""
BITS = {"4": "e3m0", "8": "int8", "16": "fp16"}
"""The codec that stands for so many bits."""


@click.command()
@click.argument("run_toml", type=FILE)
@click.option("--peers", "links_toml", type=FILE, required=True, help="The machines and their links: a TOML file.")
@click.option(
    "--fragment-layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Streaming: put N transformer blocks into a fragment.  [default: 3, or all where there are fewer]",
)
@click.option(
    "--overlap",
    "--tau",
    "overlap",
    type=click.IntRange(min=0),
    metavar="N",
    help="Streaming with overlap: train N inner steps while a fragment is exchanged.  [default: 5, or H - 1]",
)
@click.option(
    "--bits",
    type=click.Choice(list(BITS)),
    default="4",
    show_default=True,
    help="Of a value, in the last method; the others use the run's codec.",
)
@click.option(
    "--target",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=0.95,
    metavar="SHARE",
    show_default=True,
    help="Say what takes each method to this compute utilisation.",
)
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
@click.option("--plot", "plot_file", type=FILE, help="Draw utilisation over bandwidth: a .svg, or .png with cairosvg.")
@click.option("--schedule", "schedule_file", type=FILE, help="Draw what is computed and sent when, likewise.")
@click.pass_obj
def command(
    log: LogOptions,
    run_toml: Path,
    links_toml: Path,
    fragment_layers: int | None,
    overlap: int | None,
    bits: str,
    target: float,
    json_file: Path | None,
    plot_file: Path | None,
    schedule_file: Path | None,
) -> None:
    """Say what RUN_TOML would come to with given peers and links.

    Nobody needs to rent a machine for it. It compares data-parallel training, DiLoCo, and Streaming DiLoCo with and
    without overlap and fewer bits: how much of their time peers compute, what they send, how long joining takes,
    memory, tokens a day, and cost.
    """
    from opendiloco.config.run_config import RunConfig
    from opendiloco.plan.links import Links

    log.start()
    config, links = RunConfig.from_toml(run_toml), Links.from_toml(links_toml)
    for path in filter(None, (plot_file, schedule_file)):
        check_drawable(path)

    from opendiloco.model.build import sized_skeleton
    from opendiloco.plan.comparison import Settings
    from opendiloco.plan.setup import bits_of, encoded_by, memory_of, plan_of

    skeleton = sized_skeleton(config)
    plan = plan_of(config, skeleton, links)
    settings = Settings(
        fragment_layers=fragment_layers or min(FRAGMENT_LAYERS, len(plan.shape.layers)),
        overlap=min(OVERLAP, plan.inner_steps - 1) if overlap is None else overlap,
        bits=bits_of(config.codec.kind),
        fewer_bits=bits_of(BITS[bits]),
        encoded=encoded_by(config.codec.kind),
    )
    check_settings(plan, settings)
    memory = [memory_of(config, skeleton, peer) for peer in plan.swarm.peers]
    show(plan, settings, memory, target, json_file)
    draw(plan, settings, plot_file, schedule_file)


def check_settings(plan: Plan, settings: Settings) -> None:
    """Check the options against the run. Raises: UsageError."""
    from opendiloco.plan.methods import strided

    layers, given = len(plan.shape.layers), settings.fragment_layers
    if given > layers:
        raise click.UsageError(f"--fragment-layers {given}: the model has {layers} layers. Give {layers} or less.")
    fragments = len(strided(plan.shape, given))
    if fragments > plan.inner_steps:
        raise click.UsageError(
            f"--fragment-layers {given} makes {fragments} fragments, and training.inner_steps = {plan.inner_steps}"
            " has a step for so many only. Give more layers, or raise inner_steps."
        )
    if settings.overlap >= plan.inner_steps:
        raise click.UsageError(
            f"--overlap {settings.overlap}: a fragment is sent again after training.inner_steps = {plan.inner_steps}."
            f" Give {plan.inner_steps - 1} or less."
        )


def show(plan: Plan, settings: Settings, memory: Sequence[Memory], target: float, json_file: Path | None) -> None:
    """Print what the planner finds, and write it to the file, if there is one."""
    import json

    from rich.console import Console

    from opendiloco.plan import report
    from opendiloco.plan.comparison import compare, ways_to

    forecasts, ways = compare(plan, settings), ways_to(plan, settings, target)
    console = Console()
    console.print(report.headline(plan, forecasts[-1]))
    console.print(report.methods_table(forecasts))
    console.print("\nwith DiLoCo:")
    console.print(report.peers_table(plan, forecasts[1], memory))
    lacking, too_slow = report.lacking_lines(plan, memory), report.too_slow_lines(plan, forecasts[1])
    for line in (*report.cost_lines(forecasts), *lacking, *too_slow, *report.full_link_lines(forecasts)):
        console.print(line)
    console.print(f"\nto compute for {target:.1%} of the time:")
    console.print(report.ways_table(ways))
    if json_file:
        plain = report.plain(plan, forecasts, memory, ways)
        write(json_file, (json.dumps(plain, indent=2) + "\n").encode())


def draw(plan: Plan, settings: Settings, plot_file: Path | None, schedule_file: Path | None) -> None:
    """Draw what is asked for."""
    from opendiloco.plan import report
    from opendiloco.plan.figures import bandwidth_words, curves, schedules

    if plot_file:
        slowest = plan.swarm.slowest_rate
        marks = {f"the slowest link: {bandwidth_words(slowest)}": slowest}
        write(plot_file, drawn(plot_file, curves(report.utilisation_curves(plan, settings), marks)))
    if schedule_file:
        write(schedule_file, drawn(schedule_file, schedules(report.schedule_rows(plan, settings))))


def check_drawable(path: Path) -> None:
    """Check that such a file can be drawn. Raises: UsageError; MachineError where a PNG lacks its package."""
    from importlib.util import find_spec

    from opendiloco.errors import MachineError

    if path.suffix not in (".svg", ".png"):
        raise click.UsageError(f"{path}: its name ends in neither .svg nor .png. Name one that does.")
    if path.suffix == ".png" and find_spec("cairosvg") is None:
        raise MachineError(f"{path}: a PNG needs the package cairosvg.", "pip install cairosvg, or name a .svg.")


def drawn(path: Path, svg: str) -> bytes:
    """Return a figure as its file's name wants it."""
    if path.suffix == ".svg":
        return svg.encode()
    from cairosvg import svg2png

    png: bytes = svg2png(bytestring=svg.encode())
    return png


def write(path: Path, content: bytes) -> None:
    """Write a file. Raises: MachineError."""
    from opendiloco.errors import MachineError

    try:
        path.write_bytes(content)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}.", "Name another file.") from error
