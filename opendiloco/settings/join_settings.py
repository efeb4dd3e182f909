"""The settings of `diloco-peer join`, and those of all commands. The page docs/options.md is made from them.

Each is one field of a dataclass, from which its option, its environment variable and its key of the configuration file
come; a pydantic model holds the values to what the fields say. This module imports pydantic only for that, so that
`--help` and shells that complete are quick.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from opendiloco.data.own_files import OwnFiles
from opendiloco.errors import SettingsError
from opendiloco.owner.conditions import Condition, parse_conditions, parse_hours, parse_until
from opendiloco.quantities import GIGABYTE, MEGABIT, FormatName, OptimizerState
from opendiloco.workers.options import WorkerOptions, parse_overlap
from opendiloco.workers.trackers import TrackerSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

# One setting ----------------------------------------------------------------------------------------------------------
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
    for each in fields(owner):
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

    defined: dict[str, Any] = {setting.name: _pydantic_field(setting, needs_all) for setting in settings_of(owner)}
    config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    return create_model(owner.__name__, __config__=config, **defined)


def _pydantic_field(setting: Setting, needs_all: bool) -> tuple[Any, Any]:
    from pydantic import AfterValidator, Field

    item: Any = Annotated[setting.kind, Field(ge=setting.least, gt=setting.above, le=setting.most)]
    if setting.kind is Path:
        item = Annotated[item, AfterValidator(Path.expanduser), AfterValidator(_validator(_check_encoding))]
    for check in (setting.check, setting.check_here if needs_all else None):
        if check is not None:
            item = Annotated[item, AfterValidator(_validator(check))]
    default = ... if setting.is_required and needs_all else None if setting.is_required else setting.default
    if setting.is_repeated:
        return tuple[item, ...], default
    return (item if default is not None else item | None), default


def _check_encoding(path: Path) -> None:
    """Raise ValueError for a name that cannot be written into files or sent to workers."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError("its name is not UTF-8: rename it, or set LC_ALL=C.UTF-8") from error


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


# The settings ---------------------------------------------------------------------------------------------------------
MOST_GIGABYTES = 1e9  # more than any machine has; in bytes they fit 64 bits


def _exists(path: Path) -> None:
    if not path.exists():
        raise ValueError("there is no such file or folder")


def _check_nickname(name: str) -> None:
    from peers.values.wire import check_nickname  # imports pydantic, which `--help` has no time for

    check_nickname(name)


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, an IPv6 address in brackets. Raises: ValueError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (colon and bare and is_port) or (":" in bare) != (host != bare):
        raise ValueError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080")
    return bare, int(port)


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    TITLE = "The log"

    log_level: Literal["debug", "info", "warning", "error"] | None = setting(
        "What to log.", None, shown="`info` for what keeps running, `warning` for the rest"
    )
    log_file: Path | None = setting(
        "Log to this file instead of stderr. Of old lines, 30 MB are kept in files beside it.", None, metavar="FILE"
    )
    log_format: Literal["text", "json"] = setting("Log lines for people, or a JSON object a line.", "text")


@dataclass(frozen=True, kw_only=True)
class _RunSettings(Settings):
    TITLE = "The run"

    run: str = setting("The run's id, or an invite to it.", metavar="ID|INVITE")
    initial_peers: tuple[str, ...] = setting(
        "Address of a bootstrap node, or of any peer. May be repeated.", (), option="initial-peer", metavar="MULTIADDR"
    )
    identity: Path | None = setting(
        "Key file; made if it does not exist.", None, metavar="FILE", shown="this user's own"
    )
    ticket: str | None = setting(
        "What admits this machine to a run by invitation; needed once, then kept with what else --state keeps.",
        None,
        metavar="TICKET|FILE",
    )
    name: str | None = setting(
        "Show this machine to others under this nickname, beside the end of its peer id.",
        None,
        metavar="NAME",
        check=_check_nickname,
    )
    team: str | None = setting(
        "Say that this machine's work is a team's; dashboards add up what its peers have contributed.",
        None,
        metavar="NAME",
        check=_check_nickname,
    )
    data: tuple[Path, ...] = setting(
        "Train on the text in this folder or file. Given for each of the run's sources that is local, in their order.",
        (),
        metavar="PATH",
        check_here=_exists,
    )
    model: Path | None = setting(
        "Begin with the model in this folder, where the run's is one that you have to name.",
        None,
        metavar="PATH",
        check_here=_exists,
    )
    tokenizer: Path | None = setting(
        "Use this tokenizer, a folder or a tokenizer.json, where the run's is one that you have to name.",
        None,
        metavar="PATH",
        check_here=_exists,
    )
    on_partition: Literal["continue", "wait"] = setting(
        "When most of the run's peers are gone for rounds.partition_grace_seconds: train with those that are here, or "
        "wait for the others.",
        "continue",
    )


@dataclass(frozen=True, kw_only=True)
class _NetworkSettings(Settings):
    TITLE = "The network"

    listen: tuple[str, ...] = setting(
        "Where to listen; port 0 is any free one. May be repeated.",
        (),
        metavar="MULTIADDR",
        shown="/ip4/0.0.0.0/tcp/0 and /ip6/::/tcp/0",
    )
    announce: tuple[str, ...] = setting(
        "Tell others these addresses instead of those found. May be repeated.", (), metavar="MULTIADDR"
    )
    data_port: int = setting(
        "Accept bulk connections on TCP port N; 0 is any free one. Routers need not let it in.", 0, least=0, most=65535
    )
    local_network: bool = setting(
        "Say in the local network where this machine is, and look there for a run of which only the id is known. "
        "Nothing is said where this machine has a public address.",
        True,
    )
    relay_limit: float | None = setting(
        "Pass on so many megabits a second between volunteers that have no other way.",
        None,
        metavar="MBIT",
        shown="none",
        above=0,
    )
    upload_limit: float | None = setting(
        "Send model data at no more than so many megabits a second.", None, metavar="MBIT", above=0
    )
    download_limit: float | None = setting(
        "Receive model data at no more than so many megabits a second.", None, metavar="MBIT", above=0
    )
    monthly_upload: float | None = setting(
        "Send no more than so many gigabytes of model data in a calendar month (UTC): near that in thinner formats, "
        "then pause until the month is over.",
        None,
        metavar="GB",
        above=0,
        most=MOST_GIGABYTES,
    )
    monthly_download: float | None = setting(
        "Receive no more than so many gigabytes of model data in a calendar month (UTC), then pause until it is over.",
        None,
        metavar="GB",
        above=0,
        most=MOST_GIGABYTES,
    )
    contribution_format: FormatName | None = setting(
        "Send contributions in this format, of those that the run allows in codec.contributions.",
        None,
        shown="the first that the uplink carries in time",
    )

    @property
    def monthly_limits(self) -> tuple[float | None, float | None]:
        """Bytes, up and down."""
        up, down = (limit and limit * GIGABYTE for limit in (self.monthly_upload, self.monthly_download))
        return up, down


@dataclass(frozen=True, kw_only=True)
class _WorkerSettings(Settings):
    TITLE = "The training on this machine"

    device: str = setting("auto (all GPUs, or the CPU), cpu, cuda (all GPUs), or one: cuda:1 and so on.", "auto")
    gpus: int | None = setting("Train on the first N GPUs.", None, shown="all", least=1)
    cpu_workers: int = setting("Share the work among N processes, where it is the CPU that trains.", 1, least=1)
    threads: int | None = setting(
        "CPU threads of each worker.", None, shown="on the CPU all cores but one, on GPUs 1", least=1
    )
    restarts: int = setting("Start workers anew that died or failed, up to N times in a row.", 3, least=0)
    micro_batch: int | None = setting(
        "Put N windows through the model at once, for less memory.",
        None,
        shown="what fits; on the CPU no more than the run says",
        least=1,
    )
    activation_checkpointing: bool | None = setting(
        "Compute activations again instead of keeping them: less memory, more time.", None, shown="as the run says"
    )
    compile: bool | None = setting(
        "Compile the model's blocks with torch.compile, or do not.", None, shown="on GPUs, yes; on the CPU, no"
    )
    tf32: bool = setting("Let GPUs multiply in TF32 where the run says fp32: faster, 10 bits instead of 23.", False)
    whole_layers: bool = setting(
        "Several GPUs: keep layers whole between passes, and gradients; least traffic, 8 bytes more a parameter on "
        "each.",
        False,
    )
    whole_gradients: bool = setting(
        "Several GPUs: keep gradients whole until a batch's last window; less traffic, 4 bytes more a parameter on "
        "each.",
        False,
    )
    replicas: int = setting("Divide the workers into N groups, each of which shares a whole model.", 1, least=1)
    optimizer_state: OptimizerState = setting(
        "Keep AdamW's moments on the device; on the host, in main memory: 8 bytes a parameter less on each device; or "
        "on the device in 8bit: 6 bytes less.",
        "device",
    )
    overlap: str | None = setting(
        "In a run that streams: merge an average N inner steps after its fragment was taken; auto: as late as averages "
        "have been coming.",
        None,
        metavar="N",
        shown="the run's τ",
        check=parse_overlap,
    )


@dataclass(frozen=True, kw_only=True)
class _OwnerSettings(Settings):
    TITLE = "The machine's owner"

    pause_when: str | None = setting(
        "Pause while one of these holds, separated by commas: battery, busy[:PERCENT] (other programs use more of the "
        "processor than 50 %, or so many percent), hot[:CELSIUS] (a processor or GPU has 85 °C, or so many), "
        "process:NAME (a program of this name runs).",
        None,
        metavar="CONDITIONS",
        check=parse_conditions,
    )
    hours: str | None = setting(
        "Train only in these hours of the day, in local time: 22-07 or 21:30-07:15.",
        None,
        metavar="FROM-TO",
        shown="all day",
        check=parse_hours,
    )
    until: str | None = setting(
        "Leave at this moment, in local time: 07:30 (the next) or 2026-11-24 07:30.",
        None,
        metavar="TIME",
        check=lambda text: parse_until(text, datetime.now()),
    )
    nice: int = setting(
        "How much the training lets other programs come first on the processor: 0, not at all, to 19.",
        0,
        least=0,
        most=19,
    )
    max_memory: float | None = setting(
        "Keep to so many gigabytes of main memory, all processes together: a run that needs more is refused, and fewer "
        "windows go through a model on the CPU at once.",
        None,
        metavar="GB",
        shown="all that is free",
        above=0,
        most=MOST_GIGABYTES,
    )
    max_disk: float | None = setting(
        "Keep to so many gigabytes for what outlives this process: a checkpoint that does not fit is not written.",
        None,
        metavar="GB",
        shown="all that is free",
        above=0,
        most=MOST_GIGABYTES,
    )

    def conditions(self) -> tuple[Condition, ...]:
        """When to pause."""
        hours = () if self.hours is None else (parse_hours(self.hours),)
        return hours + (() if self.pause_when is None else parse_conditions(self.pause_when))

    @property
    def memory_limit(self) -> int | None:
        """Bytes."""
        return None if self.max_memory is None else int(self.max_memory * GIGABYTE)

    @property
    def disk_limit(self) -> int | None:
        """Bytes."""
        return None if self.max_disk is None else int(self.max_disk * GIGABYTE)


@dataclass(frozen=True, kw_only=True)
class _KeepingSettings(Settings):
    TITLE = "What outlives the process"

    state: Path | None = setting(
        "Keep checkpoints and what else outlives this process in FOLDER/<run id>/<peer id>.",
        None,
        metavar="FOLDER",
        shown="~/.local/state/diloco-peer",
    )
    keep: int = setting(
        "Keep the newest N checkpoints, each of 8 bytes a parameter, and the log since; 0: nothing.", 2, least=0
    )
    keep_every: int = setting("Keep those, too, whose outer step is a multiple of N.", 0, shown="none", least=0)
    remote: str | None = setting(
        "Copy each checkpoint to a folder at this URL, any that fsspec knows: s3://, gs://, hf://, sftp://, a path.",
        None,
        metavar="URL",
    )
    moments: Literal["none", "local", "remote"] = setting(
        "Keep the inner optimizer's state beside the newest checkpoint, too: on the disk, or also at --remote.", "local"
    )
    checkpoint_limit: float = setting(
        "Write and copy checkpoints at no more than so many megabits a second; --upload-limit holds for copies, too.",
        1600.0,
        metavar="MBIT",
        above=0,
    )
    journal: Path | None = setting(
        "Append every entry of the run's log that is applied here to this file.", None, metavar="FILE"
    )

    @property
    def keeps_anything(self) -> bool:
        return bool(self.keep or self.keep_every)

    @property
    def checkpoint_rate(self) -> float:
        """Bytes a second."""
        return self.checkpoint_limit * MEGABIT


@dataclass(frozen=True, kw_only=True)
class _ViewSettings(Settings):
    TITLE = "What is shown"

    metrics_port: int | None = setting(
        "Serve metrics for Prometheus, and /healthz, on port N; 0 is any free one.", None, least=0, most=65535
    )
    metrics_host: str = setting(
        "Serve metrics on this address: by default for this machine alone, 0.0.0.0 for all that reach it.",
        "127.0.0.1",
        metavar="ADDRESS",
    )
    dashboard: str | None = setting(
        "Serve a page that shows the run, such as at 127.0.0.1:8080; port 0 is any free one.",
        None,
        metavar="HOST:PORT",
        check=split_address,
    )
    track: tuple[str, ...] = setting(
        "Draw curves of this machine's training: tensorboard:FOLDER or wandb:PROJECT. May be repeated.",
        (),
        metavar="KIND:TARGET",
        check=TrackerSpec.parse,
    )
    plain: bool = setting("Log lines instead of a live screen.", False)

    @property
    def trackers(self) -> tuple[TrackerSpec, ...]:
        return tuple(map(TrackerSpec.parse, self.track))


@dataclass(frozen=True, kw_only=True)
class JoinSettings(_RunSettings, _NetworkSettings, _WorkerSettings, _OwnerSettings, _KeepingSettings, _ViewSettings):
    """All settings of one volunteer."""

    SECTIONS: ClassVar[tuple[type[Settings], ...]] = (
        _RunSettings,
        _NetworkSettings,
        _WorkerSettings,
        _OwnerSettings,
        _KeepingSettings,
        _ViewSettings,
    )

    @property
    def own_files(self) -> OwnFiles:
        return OwnFiles(self.model, self.tokenizer)

    @property
    def workers(self) -> WorkerOptions:
        """What of these the workers go by."""
        known = {each.name for each in fields(WorkerOptions)} & {each.name for each in fields(_WorkerSettings)}
        chosen = {name: getattr(self, name) for name in known}
        from opendiloco.storage.run_folder import COMPILED, default_state_folder

        cache = str(((self.state or default_state_folder()) / COMPILED).absolute())
        return WorkerOptions(**chosen, compile_cache=cache, nice=self.nice, max_memory=self.memory_limit)


SECTIONS: tuple[type[Settings], ...] = (*JoinSettings.SECTIONS, LogSettings)
"""All sections of the reference, in their order."""


@dataclass(frozen=True, kw_only=True)
class FileSettings(JoinSettings, LogSettings):
    """All that the configuration file may have."""


# The configuration file -----------------------------------------------------------------------------------------------
FILE_VARIABLE = "DILOCO_CONFIG"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "DILOCO_KERNELS", "DILOCO_PEER_TEST"})
"""Environment variables that are no settings, and are ours."""


def read_settings_file(path: Path | None = None) -> dict[str, Any]:
    """Return what a file says, as TOML has it: each value by its setting's name.

    By default it is the user's own, which need not be there. Raises: SettingsError.
    """
    found = path or default_settings_path()
    try:
        values = tomllib.loads(found.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        if path is None:
            return {}
        raise SettingsError(f"there is no configuration file {path}.", "Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{found}: not valid TOML: {error}.", "Correct the syntax there.") from error
    except OSError as error:
        raise SettingsError(f"{found} cannot be read: {error.strerror}.", "Check its permissions.") from error
    if values:
        from pydantic import ValidationError  # takes a moment, which `--help` should not without a file

        from opendiloco.config.section import describe_validation_error

        model = model_of(FileSettings, needs_all=False)
        try:
            model.model_validate_json(json.dumps(values, default=str))  # as JSON, lists are tuples, and texts paths
        except ValidationError as error:
            raise SettingsError(describe_validation_error(str(found), error, model)) from error
    return values


def default_settings_path() -> Path:
    """`~/.config/diloco-peer/config.toml`, or where XDG_CONFIG_HOME says."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diloco-peer" / "config.toml"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line about each variable that looks like a setting's and is none's."""
    known = {setting.variable for setting in settings_of(FileSettings)} | OTHER_VARIABLES
    lines = []
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            alike = get_close_matches(name, known, n=1)
            hint = f"; did you mean {alike[0]}?" if alike else "."
            lines.append(f"the environment variable {name} is no setting's{hint}")
    return lines


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that goes by its command line alone."""
    settings = {setting.variable for setting in settings_of(FileSettings)}
    return {name: value for name, value in environment.items() if name not in settings} | {FILE_VARIABLE: os.devnull}
