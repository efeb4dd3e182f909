"""`diloco-peer identity …`: the key that makes this machine the same peer again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from opendiloco.cli.options import FILE, identity_option

if TYPE_CHECKING:
    from peers.values.identity import Identity

PASSPHRASE_BYTES = 1000  # OpenSSL takes no more than 1,023
passphrase_option = click.option(
    "--passphrase-file", type=FILE, help="Take the passphrase from the first line of this file.  [default: ask for it]"
)


@click.group()
def command() -> None:
    """Show, back up and restore the key of this machine."""


@command.command(short_help="Print the peer id, and where the key is.")
@identity_option("This machine's")
def show(identity: Path | None) -> None:
    """Print the peer id of this machine's key, and the key's file. Makes no key."""
    path, key = _load(identity)
    click.echo(f"peer id:   {key.peer_id}")
    click.echo(f"key file:  {path}")


@command.command(short_help="Write the key into a file, encrypted.")
@identity_option("This machine's")
@click.argument("backup", type=FILE)
@passphrase_option
def backup(identity: Path | None, backup: Path, passphrase_file: Path | None) -> None:
    """Write this machine's key into the new file BACKUP, encrypted with a passphrase. Whoever has both is this peer."""
    _, key = _load(identity)
    with _no_replacing():
        key.save(backup, _passphrase(passphrase_file, is_new=True))
    click.echo(f"the key of {key.peer_id} is in {backup}, encrypted; without the passphrase nobody can restore it")


@command.command(short_help="Write a backup's key where `join` finds it.")
@identity_option("The new")
@click.argument("backup", type=FILE)
@passphrase_option
def restore(identity: Path | None, backup: Path, passphrase_file: Path | None) -> None:
    """Write the key in BACKUP where `join` finds it. No key is ever replaced, and only one machine may use it."""
    from opendiloco.identity_file import usable_path
    from peers.values.identity import Identity

    key, path = Identity.load(backup, _passphrase(passphrase_file, is_new=False)), usable_path(identity)
    with _no_replacing():
        key.save(path)
    click.echo(f"the key of {key.peer_id} is in {path}")


def _load(identity: Path | None) -> tuple[Path, Identity]:
    """Return this machine's key, and its file. Raises: LocalNetworkError when there is none."""
    from opendiloco.identity_file import usable_path
    from peers.values.identity import Identity

    path = usable_path(identity)
    return path, Identity.load(path)


def _passphrase(file: Path | None, is_new: bool) -> bytes:
    """Return the passphrase in a file, or what a person types; a new one twice. Raises: LocalNetworkError."""
    from peers.errors import LocalNetworkError

    if file is None:
        typed: str = click.prompt("passphrase", hide_input=True, confirmation_prompt=is_new, err=True)
        return typed.encode()
    try:
        [passphrase, *_] = [*file.read_text(encoding="utf-8").splitlines(), ""]
    except (OSError, UnicodeDecodeError) as error:
        raise LocalNetworkError(f"the passphrase's file {file} cannot be read.", "Check the path.") from error
    if not 0 < len(passphrase.encode()) <= PASSPHRASE_BYTES:
        what = "has more than 1,000 bytes" if passphrase else "is empty"
        raise LocalNetworkError(f"the first line of {file} {what}.", "Put the passphrase there.")
    return passphrase.encode()


@contextmanager
def _no_replacing() -> Iterator[None]:
    """Raises: LocalNetworkError when a key is to be written over a file that is there."""
    from peers.errors import LocalNetworkError

    try:
        yield
    except FileExistsError as error:
        raise LocalNetworkError(
            f"{error.filename2 or error.filename} is there already, and no key is written over it.",
            "Name another file, or move that one away.",
        ) from error
