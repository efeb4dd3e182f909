"""The settings of `diloco-peer join`, and the logging settings of all commands. docs/options.md lists them.

Each setting is a field of a dataclass, which defines its option, its environment variable and its key in the
configuration file. A pydantic model checks the values. Functions import pydantic only when they need it, because
`--help` and shell completion must be fast.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """A group of settings, which is one section of the reference page and of `join --help`, with the title `TITLE`."""

    TITLE: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The description of a command's setting: its key in the configuration file (`name`), option, type and limits.

    `kind` is the type of one value, also for a setting with several values. `shown` describes the default in words. A
    number is at least `least`, more than `above`, and at most `most`. `check` raises ValueError for a wrong value.
    `check_here` raises ValueError for a value that this machine cannot use, such as a missing file; it runs only when
    the setting is used.
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
        """The name of the setting's environment variable."""
        return f"{VARIABLE_PREFIX}{self.name.upper()}"

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the setting allows, or an empty tuple if the setting is no choice of words."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def spelling(self) -> str:
        """The setting's option as click declares options: --NAME, or --NAME/--no-NAME for a flag."""
        return f"--{self.option}/--no-{self.option}" if self.kind is bool else f"--{self.option}"

    @property
    def default_text(self) -> str | None:
        """The setting's default as text for people, or None without a default."""
        if self.shown is not None:
            return self.shown
        if self.is_required or self.default is None or self.default == ():
            return None
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def setting(help: str, default: Any = MISSING, **about: Any) -> Any:
    """Return a dataclass field for a setting. Without a `default`, the setting is required. `about` has further fields
    of `Setting`."""
    return field(default=default, metadata={"help": help, **about})


def settings_of(owner: type[Settings]) -> Iterator[Setting]:
    """Yield all settings of a class, inherited ones first."""
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
    """Return a strict pydantic model for a class of settings, which refuses unknown keys.

    Without `needs_all` the model is for values that are not used yet: no setting is required, and `check_here` is left
    out.
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
    """Raise ValueError for a path that is not UTF-8, which cannot be written into files or sent to workers."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError("its name is not UTF-8: rename it, or set LC_ALL=C.UTF-8") from error


def _validator(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a pydantic validator that calls `check` and returns the value unchanged."""
    from pydantic_core import PydanticCustomError

    def validate(value: Any) -> Any:
        try:
            check(value)
        except ValueError as error:
            raise PydanticCustomError("checked", "{reason}", {"reason": str(error).rstrip(".")}) from error
        return value

    return validate


# The settings ---------------------------------------------------------------------------------------------------------
MOST_GIGABYTES = 1e9  # highest allowed number of gigabytes: more than any machine has, and in bytes it fits 64 bits


def _exists(path: Path) -> None:
    if not path.exists():
        raise ValueError("there is no such file or folder: give another path")


def _check_nickname(name: str) -> None:
    from peers.values.wire import check_nickname  # imports pydantic, which would slow `--help` down

    check_nickname(name)


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT. An IPv6 host must be in brackets. Raises: ValueError."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not (colon and bare and is_port) or (":" in bare) != (host != bare):
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080")
    return bare, int(port)


@dataclass(frozen=True, kw_only=True)
class LogSettings(Settings):
    TITLE = "Logging"

    log_level: Literal["debug", "info", "warning", "error"] | None = setting(
        "Log messages of this level and above.", None, shown="`info` for long-running commands, else `warning`"
    )
    log_file: Path | None = setting(
        "Log to this file instead of stderr. Up to 30 MB of older lines stay in files beside it.", None, metavar="FILE"
    )
    log_format: Literal["text", "json"] = setting("Write log lines as text, or as one JSON object a line.", "text")


@dataclass(frozen=True, kw_only=True)
class _RunSettings(Settings):
    TITLE = "The run"

    run: str = setting("Id of the run, or an invite to it.", metavar="ID|INVITE")
    initial_peers: tuple[str, ...] = setting(
        "Address of a bootstrap node or of any peer. May be repeated.", (), option="initial-peer", metavar="MULTIADDR"
    )
    identity: Path | None = setting(
        "Key file of this peer; created if it is missing.", None, metavar="FILE", shown="one in ~/.config/diloco-peer"
    )
    ticket: str | None = setting(
        "Ticket to a run by invitation. Needed once; the folder of --state keeps it.",
        None,
        metavar="TICKET|FILE",
    )
    name: str | None = setting(
        "Nickname of at most 32 printable ASCII characters, shown beside the end of the peer id.",
        None,
        metavar="NAME",
        check=_check_nickname,
    )
    team: str | None = setting(
        "Count this machine's work for a team, whose contributions dashboards add up.",
        None,
        metavar="NAME",
        check=_check_nickname,
    )
    data: tuple[Path, ...] = setting(
        "Folder or file with the text of a local source. Give one for each local source of the run, in their order.",
        (),
        metavar="PATH",
        check_here=_exists,
    )
    model: Path | None = setting(
        "Folder with the initial model, for a run whose model is a local folder.",
        None,
        metavar="PATH",
        check_here=_exists,
    )
    tokenizer: Path | None = setting(
        "Folder or tokenizer.json with the tokenizer, for a run whose tokenizer is local.",
        None,
        metavar="PATH",
        check_here=_exists,
    )
    on_partition: Literal["continue", "wait"] = setting(
        "When most peers are gone for rounds.partition_grace_seconds: continue with the rest, or wait for the others.",
        "continue",
    )


@dataclass(frozen=True, kw_only=True)
class _NetworkSettings(Settings):
    TITLE = "The network"

    listen: tuple[str, ...] = setting(
        "Address to listen on; port 0 is any free port. May be repeated.",
        (),
        metavar="MULTIADDR",
        shown="/ip4/0.0.0.0/tcp/0 and /ip6/::/tcp/0",
    )
    announce: tuple[str, ...] = setting(
        "Address to publish instead of the detected ones. May be repeated.", (), metavar="MULTIADDR"
    )
    data_port: int = setting(
        "TCP port for model data; 0 is any free port. Routers need not open it.", 0, least=0, most=65535
    )
    local_network: bool = setting(
        "Find peers in the local network by multicast DNS. A machine with a public address does not announce itself.",
        True,
    )
    relay_limit: float | None = setting(
        "Relay at most N megabits a second between volunteers that cannot reach each other.",
        None,
        metavar="N",
        shown="none",
        above=0,
    )
    upload_limit: float | None = setting("Send at most N megabits of model data a second.", None, metavar="N", above=0)
    download_limit: float | None = setting(
        "Receive at most N megabits of model data a second.", None, metavar="N", above=0
    )
    monthly_upload: float | None = setting(
        "Send at most N gigabytes of model data in a calendar month (UTC): use thinner formats near the limit, then "
        "pause until the month ends.",
        None,
        metavar="N",
        above=0,
        most=MOST_GIGABYTES,
    )
    monthly_download: float | None = setting(
        "Receive at most N gigabytes of model data in a calendar month (UTC), then pause until the month ends.",
        None,
        metavar="N",
        above=0,
        most=MOST_GIGABYTES,
    )
    contribution_format: FormatName | None = setting(
        "Send contributions in this format, which the run's codec.contributions must list.",
        None,
        shown="the first listed that the uplink carries in time",
    )

    @property
    def monthly_limits(self) -> tuple[float | None, float | None]:
        """The monthly limits on bytes sent and on bytes received; None for no limit."""
        up, down = (limit and limit * GIGABYTE for limit in (self.monthly_upload, self.monthly_download))
        return up, down


@dataclass(frozen=True, kw_only=True)
class _WorkerSettings(Settings):
    TITLE = "The training on this machine"

    device: str = setting(
        "Train on auto (all GPUs, else the CPU), cpu, cuda (all GPUs), or one GPU, such as cuda:1.", "auto"
    )
    gpus: int | None = setting("Train on the first N GPUs.", None, shown="all", least=1)
    cpu_workers: int = setting("Share the training among N processes on the CPU.", 1, least=1)
    threads: int | None = setting(
        "CPU threads of each worker.", None, shown="all cores but one for training on the CPU, else 1", least=1
    )
    restarts: int = setting("Restart failed workers up to N times in a row.", 3, least=0)
    micro_batch: int | None = setting(
        "Compute N windows at once; fewer need less memory.",
        None,
        shown="as many as fit, on the CPU at most the run's value",
        least=1,
    )
    activation_checkpointing: bool | None = setting(
        "Recompute activations instead of keeping them: less memory, more time.", None, shown="the run's value"
    )
    compile: bool | None = setting(
        "Compile the model's blocks with torch.compile.", None, shown="yes on GPUs, no on the CPU"
    )
    tf32: bool = setting("Multiply in TF32 on GPUs in a run with fp32: faster, 10 mantissa bits instead of 23.", False)
    whole_layers: bool = setting(
        "Keep whole layers and gradients on each of several GPUs: least traffic, 8 bytes more a parameter.",
        False,
    )
    whole_gradients: bool = setting(
        "Keep whole gradients on each of several GPUs until the batch ends: less traffic, 4 bytes more a parameter.",
        False,
    )
    replicas: int = setting("Divide the workers into N groups; each group shares one whole model.", 1, least=1)
    optimizer_state: OptimizerState = setting(
        "Keep AdamW's moments on the device, in main memory (host: 8 bytes less a parameter on the device), or on the "
        "device in 8bit (6 bytes less).",
        "device",
    )
    overlap: str | None = setting(
        "In a streaming run, merge an average N inner steps after its fragment was taken; auto: as measured.",
        None,
        metavar="N",
        shown="the run's value",
        check=parse_overlap,
    )


@dataclass(frozen=True, kw_only=True)
class _OwnerSettings(Settings):
    TITLE = "Limits of the machine's owner"

    pause_when: str | None = setting(
        "Pause while a condition holds; separate several by commas. battery: no mains power; busy[:PERCENT]: other "
        "programs use more than 50 % of the processor; hot[:CELSIUS]: a processor or GPU has 85 °C; process:NAME: a "
        "program of this name runs.",
        None,
        metavar="CONDITIONS",
        check=parse_conditions,
    )
    hours: str | None = setting(
        "Train only in these hours of local time, such as 22-07 or 21:30-07:15.",
        None,
        metavar="FROM-TO",
        shown="all day",
        check=parse_hours,
    )
    until: str | None = setting(
        "Leave at this local time: 07:30 (the next one) or 2026-11-24 07:30.",
        None,
        metavar="TIME",
        check=lambda text: parse_until(text, datetime.now()),
    )
    nice: int = setting(
        "Niceness of the training, 0 to 19: at 19 other programs come first.",
        0,
        least=0,
        most=19,
    )
    max_memory: float | None = setting(
        "Use at most N gigabytes of main memory: compute fewer windows at once on the CPU, and refuse a run that needs "
        "more.",
        None,
        metavar="N",
        shown="all free memory",
        above=0,
        most=MOST_GIGABYTES,
    )
    max_disk: float | None = setting(
        "Keep at most N gigabytes in the folder of --state; a checkpoint that does not fit is not written.",
        None,
        metavar="N",
        shown="all free space",
        above=0,
        most=MOST_GIGABYTES,
    )

    def conditions(self) -> tuple[Condition, ...]:
        """Return the conditions that --hours and --pause-when name."""
        hours = () if self.hours is None else (parse_hours(self.hours),)
        return hours + (() if self.pause_when is None else parse_conditions(self.pause_when))

    @property
    def memory_limit(self) -> int | None:
        """The limit of --max-memory in bytes, or None for no limit."""
        return None if self.max_memory is None else int(self.max_memory * GIGABYTE)

    @property
    def disk_limit(self) -> int | None:
        """The limit of --max-disk in bytes, or None for no limit."""
        return None if self.max_disk is None else int(self.max_disk * GIGABYTE)


@dataclass(frozen=True, kw_only=True)
class _KeepingSettings(Settings):
    TITLE = "Files that are kept"

    state: Path | None = setting(
        "Keep checkpoints, log and other files in FOLDER/RUN-ID/PEER-ID.",
        None,
        metavar="FOLDER",
        shown="~/.local/state/diloco-peer",
    )
    keep: int = setting(
        "Keep the newest N checkpoints (8 bytes a parameter each) and the log since the oldest; 0: none.", 2, least=0
    )
    keep_every: int = setting("Also keep checkpoints whose outer step is a multiple of N.", 0, shown="none", least=0)
    remote: str | None = setting(
        "Copy each checkpoint to this folder: a path, or a URL that fsspec knows (s3://, gs://, hf://, sftp://).",
        None,
        metavar="URL",
    )
    moments: Literal["none", "local", "remote"] = setting(
        "Keep the inner optimizer's state beside the newest checkpoint: on the disk, or also at --remote.", "local"
    )
    checkpoint_limit: float = setting(
        "Write and copy checkpoints at no more than N megabits a second. --upload-limit also applies to copies.",
        1600.0,
        metavar="N",
        above=0,
    )
    journal: Path | None = setting(
        "Append every entry of the log that this peer applies to this file.", None, metavar="FILE"
    )

    @property
    def keeps_anything(self) -> bool:
        return bool(self.keep or self.keep_every)

    @property
    def checkpoint_rate(self) -> float:
        """The limit on writing and copying checkpoints, in bytes a second."""
        return self.checkpoint_limit * MEGABIT


@dataclass(frozen=True, kw_only=True)
class _ViewSettings(Settings):
    TITLE = "Display"

    metrics_port: int | None = setting(
        "Serve metrics for Prometheus and /healthz on port N; 0 is any free port.", None, least=0, most=65535
    )
    metrics_host: str = setting(
        "Serve metrics on this address; 0.0.0.0 serves other machines, too.",
        "127.0.0.1",
        metavar="ADDRESS",
    )
    dashboard: str | None = setting(
        "Serve a web page about the run, such as at 127.0.0.1:8080; port 0 is any free port.",
        None,
        metavar="HOST:PORT",
        check=split_address,
    )
    track: tuple[str, ...] = setting(
        "Record curves of the training with tensorboard:FOLDER or wandb:PROJECT. May be repeated.",
        (),
        metavar="KIND:TARGET",
        check=TrackerSpec.parse,
    )
    plain: bool = setting("Print log lines instead of a live screen.", False)

    @property
    def trackers(self) -> tuple[TrackerSpec, ...]:
        return tuple(map(TrackerSpec.parse, self.track))


@dataclass(frozen=True, kw_only=True)
class JoinSettings(_RunSettings, _NetworkSettings, _WorkerSettings, _OwnerSettings, _KeepingSettings, _ViewSettings):
    """All settings of `join`."""

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
        known = {each.name for each in fields(WorkerOptions)} & {each.name for each in fields(_WorkerSettings)}
        chosen = {name: getattr(self, name) for name in known}
        from opendiloco.storage.run_folder import COMPILED, default_state_folder

        cache = str(((self.state or default_state_folder()) / COMPILED).absolute())
        return WorkerOptions(**chosen, compile_cache=cache, nice=self.nice, max_memory=self.memory_limit)


SECTIONS: tuple[type[Settings], ...] = (*JoinSettings.SECTIONS, LogSettings)
"""All sections of the reference page, in their order."""


@dataclass(frozen=True, kw_only=True)
class FileSettings(JoinSettings, LogSettings):
    """All settings that the configuration file may contain."""


# The configuration file -----------------------------------------------------------------------------------------------
FILE_VARIABLE = "DILOCO_CONFIG"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "DILOCO_KERNELS", "DILOCO_PEER_TEST"})
"""Environment variables of this project that are not settings."""


def read_settings_file(path: Path | None = None) -> dict[str, Any]:
    """Return the values in a configuration file, by the names of their settings.

    Without a path it reads the user's own file, if there is one. Raises: SettingsError.
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
        from pydantic import ValidationError  # slow import, not needed for `--help` without a settings file

        from opendiloco.config.section import describe_validation_error

        model = model_of(FileSettings, needs_all=False)
        try:
            # Validated as JSON, since strict pydantic then accepts lists as tuples and texts as paths.
            model.model_validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            raise SettingsError(describe_validation_error(str(found), error, model)) from error
    return values


def default_settings_path() -> Path:
    """Return `~/.config/diloco-peer/config.toml`, or the same file below XDG_CONFIG_HOME."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "diloco-peer" / "config.toml"


def unread_variables(environment: Mapping[str, str], settings: Iterable[Setting]) -> list[str]:
    """Return the names of the variables that begin with DILOCO_ and belong to none of the `settings`, in order."""
    known = {setting.variable for setting in settings} | OTHER_VARIABLES
    return sorted(name for name in environment if name.startswith(VARIABLE_PREFIX) and name not in known)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that begins with DILOCO_ and belongs to no setting."""
    settings = list(settings_of(FileSettings))
    known, lines = {setting.variable for setting in settings} | OTHER_VARIABLES, []
    for name in unread_variables(environment, settings):
        alike = get_close_matches(name, known, n=1)
        hint = f"; did you mean {alike[0]}?" if alike else "."
        lines.append(f"the environment variable {name} has no effect: no setting has this name{hint}")
    return lines


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` for a process that must read settings only from its command line: without settings, and with
    an empty configuration file."""
    settings = {setting.variable for setting in settings_of(FileSettings)}
    return {name: value for name, value in environment.items() if name not in settings} | {FILE_VARIABLE: os.devnull}
