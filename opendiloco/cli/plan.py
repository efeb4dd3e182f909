"""`diloco-peer plan`: what a run would come to with given machines and links."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE


@click.command()
@click.argument("run_toml", type=FILE)
@click.option("--peers", "links_toml", type=FILE, required=True, help="The machines and their links: a TOML file.")
@click.option("--json", "json_file", type=FILE, help="Write all figures to this file.")
@click.pass_obj
def command(log: LogOptions, run_toml: Path, links_toml: Path, json_file: Path | None) -> None:
    """Say what RUN_TOML would come to with given peers and links.

    Nobody needs to rent a machine for it: how much of their time peers compute, what they send, how long joining
    takes, memory, tokens a day, cost, and the bandwidth that computing for more of the time would need.
    """
    import json

    from opendiloco.config.run_config import RunConfig
    from opendiloco.tools.plan.setup import Links

    log.start()
    config, links = RunConfig.from_toml(run_toml), Links.from_toml(links_toml)

    from rich.console import Console

    from opendiloco.model.build import sized_skeleton
    from opendiloco.tools.plan import report
    from opendiloco.tools.plan.forecast import forecast, least_bandwidth
    from opendiloco.tools.plan.setup import memory_of, plan_of

    skeleton = sized_skeleton(config)
    plan = plan_of(config, skeleton, links)
    memory = [memory_of(config, skeleton, peer) for peer in plan.swarm.peers]
    found = forecast(plan)
    needed = {target: least_bandwidth(plan, target) for target in report.TARGETS}
    console = Console()
    console.print(report.headline(plan))
    console.print(report.run_table(found))
    console.print()
    console.print(report.peers_table(plan, found, memory))
    for line in filter(None, (report.cost_line(found), *report.warnings(plan, found, memory))):
        console.print(line)
    console.print()
    console.print(report.bandwidth_table(needed))
    if json_file:
        write(json_file, json.dumps(report.plain(plan, found, memory, needed), indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file. Raises: MachineError."""
    from opendiloco.errors import MachineError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}.", "Name another file.") from error
