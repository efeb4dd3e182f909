"""Command line options made from settings. What the command line does not say, the environment and the file may."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from opendiloco.settings.join_settings import JoinSettings, LogSettings
from opendiloco.settings.setting import Setting, settings_of

Command = TypeVar("Command", bound=Callable[..., Any])
FILE_KEY = "opendiloco.settings.file"
PATH_KEY = "opendiloco.settings.path"
"""Where click's contexts have what the configuration file says, and its path."""
JOIN = {setting.name: setting for section in JoinSettings.SECTIONS for setting in settings_of(section)}
"""`join`'s settings by name, in the order of its help."""
HOW_TO_FIND = {
    "run": "Its organiser gives out an invite; `diloco-peer runs` lists the runs that a bootstrap node knows."
}
"""What to do where an option lacks that has to be given."""


class SettingOption(click.Option):
    """An option for which the configuration file has a say, before the default."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        said = file_values(ctx)
        if source is ParameterSource.DEFAULT and self.name in said:
            return said[self.name], ParameterSource.DEFAULT_MAP
        return value, source

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.MissingParameter as error:
            raise click.MissingParameter(HOW_TO_FIND.get(self.name or ""), ctx, self) from error


class SettingsCommand(click.Command):
    """A command with all settings: its help shows them section by section, as the reference does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {setting.name: part.TITLE for part in JoinSettings.SECTIONS for setting in settings_of(part)}
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                rows.setdefault(titles.get(parameter.name or "", "Options"), []).append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


def file_values(context: click.Context) -> Mapping[str, Any]:
    """Return what the configuration file says, as TOML has it."""
    found: Mapping[str, Any] = context.meta.get(FILE_KEY, {})
    return found


def is_typed(context: click.Context, name: str) -> bool:
    """Whether the command line itself has this option."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def option_for(setting: Setting, help: str | None = None, **more: Any) -> Callable[[Command], Command]:
    """Return click's option for a setting, with `more` of what click takes."""
    text, shown = help or setting.help, setting.default_text
    text = text if shown is None else f"{text}  [default: {shown}]"
    return click.option(
        setting.spelling,
        setting.name,
        cls=SettingOption,
        type=_type_of(setting),
        multiple=setting.is_repeated,
        metavar=setting.metavar,
        envvar=setting.variable,
        help=text,
        # An option that has to be given must have no default, not even None: click would take that for given.
        **({"required": True} if setting.is_required else {"default": None if setting.is_repeated else setting.default})
        | more,
    )


def join_option(name: str, **changed: Any) -> Callable[[Command], Command]:
    """Return the option for one of `join`'s settings, for a command that shares it."""
    return option_for(JOIN[name], **changed)


def log_options(command: Command) -> Command:
    """Add the options for the log to a command."""
    return _with_all(command, list(settings_of(LogSettings)))


def join_settings(needs_run: bool = True) -> Callable[[Command], Command]:
    """Give a command all of `join`'s options, and what they say as one argument: `settings`.

    Unless it `needs_run`, none needs to be named: `run` is empty then.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_settings(*arguments: Any, **values: Any) -> Any:
            own = {setting.name: values.pop(setting.name) for setting in JOIN.values()}
            given = {name: value for name, value in own.items() if value is not None}
            if not needs_run:
                given = {"run": ""} | given
            return command(*arguments, settings=_checked(given), **values)

        changed = {} if needs_run else {"required": False}
        return _with_all(cast(Command, with_settings), list(JOIN.values()), changed)

    return decorate


def _checked(values: Mapping[str, Any]) -> JoinSettings:
    """Return settings made of values. Raises: BadParameter that names the option of the first that is wrong."""
    from pydantic import ValidationError

    from opendiloco.settings.setting import checked

    try:
        return checked(JoinSettings, values)
    except ValidationError as error:
        problem = error.errors()[0]
        option = f"--{JOIN[str(problem['loc'][0])].option}"
        raise click.BadParameter(f"{problem['input']!s}: {problem['msg']}.", param_hint=repr(option)) from error


def _with_all(command: Command, settings: list[Setting], changed: Mapping[str, Any] | None = None) -> Command:
    wrapped: Any = command
    for setting in reversed(settings):
        wrapped = option_for(setting, **(changed or {} if setting.is_required else {}))(wrapped)
    return cast(Command, wrapped)


def _type_of(setting: Setting) -> Any:
    """Return click's type for one value."""
    if setting.choices:
        return click.Choice(setting.choices)
    if setting.is_path:
        return click.Path(path_type=Path, file_okay=setting.metavar != "FOLDER", dir_okay=setting.metavar != "FILE")
    if setting.kind not in (int, float):
        return bool if setting.is_flag else str
    low = setting.least if setting.above is None else setting.above
    if low is None and setting.most is None:
        return setting.kind
    bounded: Any = click.IntRange if setting.kind is int else click.FloatRange
    return bounded(low, setting.most, min_open=setting.above is not None)
