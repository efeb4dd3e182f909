"""The pydantic models of settings: strict, and without unknown keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from opendiloco.settings.setting import Setting, Settings, settings_of

Owner = TypeVar("Owner", bound=Settings)


def checked(owner: type[Owner], values: Mapping[str, Any]) -> Owner:
    """Return settings made of values that have their types already. Raises: pydantic.ValidationError."""
    return owner(**dict(model_of(owner).model_validate(dict(values))))


def model_of(owner: type[Settings], needs_all: bool = True) -> type[BaseModel]:
    """Return the model of a class of settings. Unless it `needs_all`, they are not used yet: none of them is required,
    and none held to what is on this machine."""
    fields: dict[str, Any] = {setting.name: _field(setting, needs_all) for setting in settings_of(owner)}
    config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    return create_model(owner.__name__, __config__=config, **fields)


def _field(setting: Setting, needs_all: bool) -> tuple[Any, Any]:
    about = setting.about
    item: Any = Annotated[setting.kind, Field(ge=about.least, gt=about.above, le=about.most)]
    if setting.is_path:
        item = Annotated[item, AfterValidator(Path.expanduser)]
    for check in (about.check, about.check_here if needs_all else None):
        if check is not None:
            item = Annotated[item, _check_by(check)]
    default = ... if setting.is_required and needs_all else None if setting.is_required else setting.default
    if setting.is_repeated:
        return tuple[item, ...], default
    return (item if default is not None else item | None), default


def _check_by(check: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that holds a value to a check. The value stays as it was given."""

    def validate(value: Any) -> Any:
        try:
            check(value)
        except ValueError as error:
            raise PydanticCustomError("checked", "{reason}", {"reason": str(error).rstrip(".")}) from error
        return value

    return AfterValidator(validate)
