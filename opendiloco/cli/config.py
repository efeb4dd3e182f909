"""`diloco-peer config …`: what the settings of this machine are, and where each comes from."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from opendiloco.cli.setting_options import PATH_KEY, join_settings

if TYPE_CHECKING:
    from opendiloco.settings.join_settings import JoinSettings
    from opendiloco.settings.setting import Setting

ORIGINS = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}


@click.group()
def command() -> None:
    """Look at the settings of this machine."""


@command.command(short_help="Print each setting, and where it comes from.")
@join_settings(needs_run=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: each setting's `value` and `from`.")
@click.pass_context
def show(context: click.Context, settings: JoinSettings, as_json: bool) -> None:
    """Print what `join` would go by, given the same options, and where each value comes from: the command line, an
    environment variable, the configuration file, or the default."""
    from opendiloco.settings.file import unknown_variables
    from opendiloco.settings.join_settings import SECTIONS, LogSettings
    from opendiloco.settings.setting import settings_of

    shown: dict[str, dict[str, Any]] = {}
    lines = []
    for section in SECTIONS:
        where = context.find_root() if section is LogSettings else context
        lines += ["", f"# {section.TITLE}"]
        for setting in settings_of(section):
            origin = _origin(where, setting)
            value = where.params[setting.name] if section is LogSettings else getattr(settings, setting.name)
            plain = _plain(value)
            shown[setting.name] = {"value": plain or None if setting.name == "run" else plain, "from": origin}
            lines.append(_line(setting, plain, origin))
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    path = context.meta[PATH_KEY]
    click.echo(f"configuration file: {path}{'' if path.exists() else ' (there is none)'}")
    click.echo("\n".join(lines))
    for warning in unknown_variables(os.environ):
        click.echo(f"warning: {warning}", err=True)


def _origin(context: click.Context, setting: Setting) -> str:
    source = context.get_parameter_source(setting.name)
    origin = "default" if source is None else ORIGINS.get(source, "default")
    return f"environment, {setting.variable}" if source is ParameterSource.ENVIRONMENT else origin


def _plain(value: Any) -> Any:
    """Return a value as JSON and TOML can say it."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _line(setting: Setting, value: Any, origin: str) -> str:
    """Return a setting as a line of the configuration file; one without a value is commented out."""
    if value is None or value == [] or (setting.is_required and not value):
        unset = f"# {setting.name}"
        return f"{unset}  ({setting.default_text})" if setting.default_text else unset
    return f"{setting.name} = {json.dumps(value)}  # {origin}"
