"""`diloco-peer evaluate`: an exported model on the tasks that people know, by EleutherAI's lm-eval."""

from __future__ import annotations

from pathlib import Path

import click

from opendiloco.cli.options import FOLDER


@click.command(
    short_help="Evaluate an exported model on known tasks, with lm-eval.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tasks", required=True, metavar="NAMES", help="Names of lm-eval's tasks, separated by commas.")
@click.option("--include", type=FOLDER, help="A folder with tasks of your own, besides lm-eval's.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of each task.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    default=8,
    show_default=True,
    help="Put N examples through the model at once.",
)
@click.option("--device", default=None, help="cpu, cuda, cuda:1 and so on.  [default: as lm-eval chooses]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the results, as JSON, below this folder or to a file."
)
@click.argument("others", nargs=-1, type=click.UNPROCESSED)
def command(
    model: Path,
    tasks: str,
    include: Path | None,
    limit: int | None,
    batch_size: int,
    device: str | None,
    out: Path | None,
    others: tuple[str, ...],
) -> None:
    """Evaluate MODEL, a folder that `export` has written, with lm-eval.

    Options after `--` are lm-eval's own. lm-eval downloads what most of its tasks are made of.
    """
    import subprocess
    import sys

    from opendiloco.errors import MachineError

    check_include(include)
    check_installed()
    if set(str(model)) & {",", "="}:
        raise MachineError(f"lm-eval cannot read a path with a comma or an equals sign: {model}.", "Rename the folder.")
    options = {
        "--tasks": tasks,
        "--include_path": include,
        "--limit": limit,
        "--batch_size": batch_size,
        "--device": device,
        "--output_path": out,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    arguments = f"pretrained={model},trust_remote_code=False"
    called = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, *given, *others]
    code = subprocess.run(called, check=False).returncode
    if code:
        raise MachineError(
            f"lm-eval ended with exit status {code}.",
            "Its own words are above. Most tasks are downloaded: without the internet, use --include with local ones.",
        )


def check_include(folder: Path | None) -> None:
    """Raises: BadParameter unless this folder, if one is given, is there: lm-eval would pass over it without a word,
    and then show a traceback, since it does not know the task."""
    if folder is not None and not folder.is_dir():
        raise click.BadParameter(
            f"{str(folder)!r} is not there. Name a folder that has the YAML files of your tasks.",
            param_hint="--include",
        )


def check_installed() -> None:
    """Raises: MachineError where lm-eval is not installed."""
    from importlib.util import find_spec

    from opendiloco.errors import MachineError

    if find_spec("lm_eval") is None:
        raise MachineError("lm-eval is not installed here.", 'Install it: pip install "diloco-peer[evaluate]".')
