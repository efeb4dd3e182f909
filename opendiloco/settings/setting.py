"""The ways to say one setting: an option, an environment variable, and a key of the configuration file.

All of them come from one field of a dataclass, and a pydantic model holds the values to what the fields say. This
module imports pydantic only for that, so that `--help` and shells that complete are quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import BaseModel

VARIABLE_PREFIX = "DILOCO_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that belong together. Each class of them is a section of the reference, with its title."""

    TITLE: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of `Settings`, as people can give it.

    `kind` is the type of a value, of one where there are several. `shown` says in words what holds without a value.
    Numbers are at least `least`, or more than `above`, and at most `most`. `check` raises ValueError for a value that
    is wrong; `check_here` for one that this machine does not go with, which matters only to who uses it.
    """

    name: str
    kind: Any
    is_repeated: bool
    default: Any
    option: str
    help: str
    metavar: str | None = None
    shown: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    check: Callable[[Any], object] | None = None
    check_here: Callable[[Any], object] | None = None

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{VARIABLE_PREFIX}{self.name.upper()}"

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are allowed; empty where any are."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def spelling(self) -> str:
        """The option with its other half, as click declares it."""
        return f"--{self.option}/--no-{self.option}" if self.kind is bool else f"--{self.option}"

    @property
    def default_text(self) -> str | None:
        """What holds without a value, for people; None where there is nothing to say."""
        if self.shown is not None:
            return self.shown
        if self.is_required or self.default is None or self.default == ():
            return None
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def setting(help: str, default: Any = MISSING, **about: Any) -> Any:
    """Return a field of `Settings`, required unless it has a default; see `Setting`."""
    return field(default=default, metadata={"help": help, **about})


def settings_of(owner: type[Settings]) -> Iterator[Setting]:
    """Yield all settings of a class, those that it has inherited first."""
    hints = get_type_hints(owner)
    for each in dataclasses.fields(owner):
        kind = hints[each.name]
        if get_origin(kind) in (UnionType, Union):
            kind = next(one for one in get_args(kind) if one is not NoneType)
        is_repeated = get_origin(kind) is tuple
        kind = get_args(kind)[0] if is_repeated else kind
        metavar = "N" if kind is int else None
        about: dict[str, Any] = {"option": each.name.replace("_", "-"), "metavar": metavar, **each.metadata}
        yield Setting(name=each.name, kind=kind, is_repeated=is_repeated, default=each.default, **about)


def model_of(owner: type[Settings], needs_all: bool = True) -> type[BaseModel]:
    """Return the pydantic model of a class of settings: strict, and without unknown keys.

    Unless it `needs_all`, the settings are not used yet: none of them is required, and none held to what is on this
    machine.
    """
    from pydantic import ConfigDict, create_model

    fields: dict[str, Any] = {setting.name: _pydantic_field(setting, needs_all) for setting in settings_of(owner)}
    config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    return create_model(owner.__name__, __config__=config, **fields)


def _pydantic_field(setting: Setting, needs_all: bool) -> tuple[Any, Any]:
    from pydantic import AfterValidator, Field

    item: Any = Annotated[setting.kind, Field(ge=setting.least, gt=setting.above, le=setting.most)]
    if setting.kind is Path:
        item = Annotated[item, AfterValidator(Path.expanduser)]
    for check in (setting.check, setting.check_here if needs_all else None):
        if check is not None:
            item = Annotated[item, AfterValidator(_validator(check))]
    default = ... if setting.is_required and needs_all else None if setting.is_required else setting.default
    if setting.is_repeated:
        return tuple[item, ...], default
    return (item if default is not None else item | None), default


def _validator(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a validator that holds a value to a check. The value stays as it was given."""
    from pydantic_core import PydanticCustomError

    def validate(value: Any) -> Any:
        try:
            check(value)
        except ValueError as error:
            raise PydanticCustomError("checked", "{reason}", {"reason": str(error).rstrip(".")}) from error
        return value

    return validate
