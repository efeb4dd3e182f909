"""`diloco-peer demo`: a swarm on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.exit_codes import INTERRUPTED
from opendiloco.cli.logs import LogOptions
from opendiloco.cli.options import FILE, NEW_FOLDER

if TYPE_CHECKING:
    from opendiloco.tools.demo import DemoResult, DemoScreen


@click.command(short_help="Watch a swarm train a small model on this machine.")
@click.option(
    "--peers", type=click.IntRange(min=1), metavar="N", default=3, show_default=True, help="Number of volunteers."
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.5),
    metavar="N",
    default=3.0,
    show_default=True,
    help="How long it may take. Half way a volunteer is killed and another one joins, which takes up to a minute.",
)
@click.option("--run", type=FILE, help="The run.toml to train.  [default: a small Llama on Python's standard library]")
@click.option("--out", type=NEW_FOLDER, help="New folder for model and logs.  [default: a temporary one]")
@click.option("--plain", is_flag=True, help="Lines instead of a live screen.")
@click.pass_obj
def command(log: LogOptions, peers: int, minutes: float, run: Path | None, out: Path | None, plain: bool) -> None:
    """Watch a swarm of volunteers train a small model on this machine."""
    from opendiloco.tools.demo import DemoOptions, DemoScreen, run_demo
    from opendiloco.volunteer.interrupts import run_interruptible

    log.start()
    options = DemoOptions(peers, minutes, run, out, plain)
    with DemoScreen(minutes * 60, plain) as screen:
        result = run_interruptible(lambda interrupts: run_demo(options, screen))
    if result is None:
        raise SystemExit(INTERRUPTED)
    raise SystemExit(conclude(result, screen))


def conclude(result: DemoResult, screen: DemoScreen) -> int:
    """Print what came out; returns the exit code."""
    facts = result.facts
    summary = (
        ("run", facts.run_id),
        ("trained", f"{facts.outer_steps} outer steps, {facts.tokens:,} tokens"),
        ("held-out loss", f"{result.before:.3f} before, {facts.held_out_loss:.3f} after (nats per token)"),
        ("digests", str(result.agreement)),
        ("model", f"{result.folder / 'model'} (for AutoModelForCausalLM.from_pretrained)"),
        ("logs", str(result.folder / "logs")),
    )
    screen.say("\nwhat the model writes:\n")
    for line in result.sample.splitlines():
        screen.say(f"    {line}")
    screen.say("")
    for name, text in summary:
        screen.say(f"{name:<15}{text}")
    for problem in result.problems:
        click.echo(f"error: {problem}", err=True)
    return 1 if result.problems else 0
