"""What `pause`, `resume` and `finish` have in common: they tell volunteers on this machine what their owner wants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from opendiloco.cli.options import state_option
from opendiloco.cli.setting_options import is_typed, join_option


def volunteer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which volunteers are meant, and give the command their sockets as `volunteers`."""

    @functools.wraps(command)
    def with_volunteers(
        *arguments: Any, run: str | None, state: Path | None, all_of_them: bool, peer: str, **values: Any
    ) -> Any:
        named = run if is_typed(click.get_current_context(), "run") else None
        return command(*arguments, volunteers=_find(named, state, peer, all_of_them), **values)

    wrapped: Any = with_volunteers
    for option in (
        click.option(
            "--all", "all_of_them", is_flag=True, help="All volunteers on this machine, if there are several."
        ),
        click.option("--peer", metavar="ID", default="", help="The volunteer with this peer id; its end will do."),
        state_option("Where the volunteers keep what outlives them, as `join` has it."),
        join_option("run", help="The run's id, or an invite to it: only the volunteers in it.", required=False),
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def _find(run: str | None, state: Path | None, peer: str, all_of_them: bool) -> list[Path]:
    """Raises: MachineError when there is none, or it is not clear which is meant."""
    from opendiloco.errors import MachineError
    from opendiloco.owner.controls import Request, ask, sockets
    from opendiloco.storage.run_folder import default_state_folder
    from peers.values.manifest import Invite

    folder = state or default_state_folder()
    run_id = None if run is None else Invite.parse(run).run_id
    named = [path for path in sockets(folder, run_id) if path.parent.name.endswith(peer.lstrip("…"))]
    found = [path for path in named if ask(path, Request(do="look")) is not None]
    if not found:
        which = " ".join(filter(None, (peer, run_id and f"of {run_id}", f"in {folder}")))
        raise MachineError(f"no volunteer {which} is running.", "Give --state, if `join` was given one.")
    if len(found) > 1 and not all_of_them:
        each = ", ".join(map(_name, found))
        raise MachineError(
            f"{len(found)} volunteers are running: {each}.", "Choose with --run or --peer, or take --all."
        )
    return found


def _name(volunteer: Path) -> str:
    """Return a volunteer's run, and the end of its peer id."""
    run, peer = volunteer.parent.parent.name, volunteer.parent.name
    return f"{run} (…{peer[-8:]})"


def tell(volunteers: list[Path], do: Any, anyway: bool = False) -> None:
    """Tell each volunteer, and print what it says. Raises: MachineError when one does not answer."""
    from opendiloco.errors import MachineError
    from opendiloco.owner.controls import Request, ask

    for path in volunteers:
        answer = ask(path, Request(do=do, anyway=anyway))
        if answer is None:
            raise MachineError(f"the volunteer of {path.parent} does not answer.", "It may just have ended.")
        click.echo(f"{_name(path)}: {answer.says}")
