"""The ways to say one setting: an option, an environment variable, and a key of the configuration file.

All of them come from one field of a dataclass. This module imports little, so that `--help` and shells that complete
are quick; `checks` has the pydantic model that holds the values to what the fields say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

VARIABLE_PREFIX = "DILOCO_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that belong together. Each class of them is a section of the reference, with its title."""

    TITLE: ClassVar[str] = ""


@dataclass(frozen=True)
class About:
    """What there is to say of a setting beside its type and default.

    `option` is the option's name where it is not the field's. `shown` says in words what holds without a value. Numbers
    are at least `least`, or more than `above`, and at most `most`. `check` raises ValueError for a value that is wrong;
    `check_here` for one that this machine does not go with, which matters only to who uses it.
    """

    help: str
    option: str | None = None
    metavar: str | None = None
    shown: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    check: Callable[[Any], object] | None = None
    check_here: Callable[[Any], object] | None = None


def setting(help: str, default: Any = MISSING, **about: Any) -> Any:
    """Return a field of `Settings`, required unless it has a default; see `About`."""
    return field(default=default, metadata={"about": About(help, **about)})


@dataclass(frozen=True)
class Setting:
    """One field of `Settings`, as people can give it. `kind` is the type of a value, of one where there are several."""

    name: str
    hint: Any
    default: Any
    about: About

    @property
    def option(self) -> str:
        return self.about.option or self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{VARIABLE_PREFIX}{self.name.upper()}"

    @property
    def kind(self) -> Any:
        return get_args(self._values)[0] if self.is_repeated else self._values

    @property
    def is_repeated(self) -> bool:
        return get_origin(self._values) is tuple

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def is_path(self) -> bool:
        return self.kind is Path

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed; empty where any are."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def spelling(self) -> str:
        """The option with its other half, as click declares it."""
        return f"--{self.option}/--no-{self.option}" if self.is_flag else f"--{self.option}"

    @property
    def default_text(self) -> str | None:
        """What holds without a value, for people; None where there is nothing to say."""
        if self.about.shown is not None:
            return self.about.shown
        if self.is_required or self.default is None or self.default == ():
            return None
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def _values(self) -> Any:
        """The type of what is given."""
        if get_origin(self.hint) in (UnionType, Union):
            return next(each for each in get_args(self.hint) if each is not NoneType)
        return self.hint


def settings_of(owner: type[Settings]) -> Iterator[Setting]:
    """Yield all settings of a class, those that it has inherited first."""
    hints = get_type_hints(owner)
    for each in dataclasses.fields(owner):
        yield Setting(each.name, hints[each.name], each.default, each.metadata["about"])


def setting_of(owner: type[Settings], name: str) -> Setting:
    """Return one setting."""
    return next(setting for setting in settings_of(owner) if setting.name == name)
