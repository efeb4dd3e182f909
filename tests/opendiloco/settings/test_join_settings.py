"""The settings: where a value may come from, which comes first, and what is said of one that is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError

from opendiloco.cli.group import main
from opendiloco.errors import SettingsError
from opendiloco.settings.join_settings import (
    FileSettings,
    JoinSettings,
    model_of,
    read_settings_file,
    settings_of,
    unknown_variables,
    without_settings,
)
from opendiloco.workers.options import WorkerOptions
from peers.values.wire import NICKNAME_LENGTH

ROOT = Path(__file__).parents[3]
SETTINGS = list(settings_of(FileSettings))


def show(*arguments: str, file: Path | None = None, **environment: str) -> Result:
    first = [] if file is None else ["--config", str(file)]
    return CliRunner().invoke(main, [*first, "config", "show", *arguments], env=environment)


def shown(*arguments: str, file: Path | None = None, **environment: str) -> dict[str, Any]:
    done = show("--json", *arguments, file=file, **environment)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('keep = 3\nupload_limit = 20\ninitial_peers = ["/dns/one"]\nlog_level = "error"\ntf32 = true\n')
    return path


# Precedence -----------------------------------------------------------------------------------------------------------
def test_the_command_line_comes_before_the_environment_before_the_file_before_the_default(file: Path) -> None:
    assert shown()["keep"] == {"value": 2, "from": "default"}
    assert shown(file=file)["keep"] == {"value": 3, "from": "file"}
    assert shown(file=file, DILOCO_KEEP="4")["keep"] == {"value": 4, "from": "environment, DILOCO_KEEP"}
    assert shown("--keep", "5", file=file, DILOCO_KEEP="4")["keep"] == {"value": 5, "from": "command line"}


def test_values_keep_their_types_wherever_they_come_from(file: Path, tmp_path: Path) -> None:
    found = shown(file=file, DILOCO_DATA=f"{tmp_path}:{ROOT}", DILOCO_COMPILE="no", DILOCO_LISTEN="/a /b")
    assert found["upload_limit"]["value"] == 20.0
    assert found["initial_peers"] == {"value": ["/dns/one"], "from": "file"}
    assert found["data"]["value"] == [str(tmp_path), str(ROOT)]
    assert found["compile"]["value"] is False
    assert found["listen"]["value"] == ["/a", "/b"]
    assert found["log_level"] == {"value": "error", "from": "file"}


def test_what_the_file_turns_on_the_command_line_can_turn_off(file: Path) -> None:
    assert shown(file=file)["tf32"] == {"value": True, "from": "file"}
    assert shown("--no-tf32", file=file)["tf32"] == {"value": False, "from": "command line"}


def test_the_users_own_file_counts_unless_another_is_named(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "diloco-peer"
    folder.mkdir()
    (folder / "config.toml").write_text("keep = 7\n")
    assert shown(XDG_CONFIG_HOME=str(tmp_path), DILOCO_CONFIG="")["keep"]["value"] == 7
    assert shown(file=file, XDG_CONFIG_HOME=str(tmp_path), DILOCO_CONFIG="")["keep"]["value"] == 3


def test_other_commands_take_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('run = "no-such-run"\n')
    done = CliRunner().invoke(main, ["--config", str(path), "status"])
    assert done.exit_code == 3
    assert "no-such-run" in done.stderr


# What is wrong --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("upload_limt = 3", "upload_limt = 3: unknown key. Did you mean upload_limit?"),
        ("keep = -1", "keep = -1: too small. Use 0 or more."),
        ('keep = "3"', "keep = '3': not a whole number."),
        ('moments = "all"', "moments = 'all': not known here. Use 'none', 'local' or 'remote'."),
        ('track = ["nothing"]', "neither tensorboard:FOLDER nor wandb:PROJECT"),
        ("keep = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_names_key_value_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings_file(path)
    assert said in str(caught.value)
    done = show(file=path)
    assert (done.exit_code, str(path) in done.stderr) == (2, True)


def test_a_file_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    done = show(file=tmp_path / "none.toml")
    assert done.exit_code == 2
    assert "none.toml" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep", "-1"], "--keep"),
        (["--track", "nothing"], "Invalid value for '--track': 'nothing' is neither tensorboard:FOLDER"),
        (["--max-memory", "1e300"], "'--max-memory': 1e+300"),
        (
            ["--team", " a "],
            "Invalid value for '--team': ' a ' is not a valid name of a team or peer: give 1 to 32 printable",
        ),
        (
            ["--data", "/no/such/folder"],
            "Invalid value for '--data': /no/such/folder: there is no such file or folder: give another path.",
        ),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str) -> None:
    done = show(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_folder_of_the_file_has_to_be_there_for_those_who_read_it(tmp_path: Path) -> None:
    """`pause` failed where a disk with data was not mounted."""
    file = tmp_path / "config.toml"
    file.write_text('data = ["/no/such/folder"]\n')
    assert read_settings_file(file) == {"data": ["/no/such/folder"]}
    paused = CliRunner().invoke(main, ["--config", str(file), "pause", "--state", str(tmp_path)])
    assert paused.exit_code == 6, "there is no volunteer"
    joined = CliRunner().invoke(main, ["--config", str(file), "join", "--run", "tiny-x"])
    assert joined.exit_code == 2
    assert "'--data': /no/such/folder: there is no such file or folder: give another path." in joined.stderr


def test_a_wrong_variable_is_wrong_usage() -> None:
    done = show(DILOCO_KEEP="many")
    assert (done.exit_code, "--keep" in done.stderr) == (2, True)


def test_a_path_that_is_not_text_is_refused() -> None:
    """Regression: below such a folder moments were never kept, and nothing said so."""
    with pytest.raises(ValidationError, match=r"its name is not UTF-8: rename it, or set LC_ALL=C.UTF-8"):
        model_of(JoinSettings, needs_all=False).model_validate({"state": Path("st\udce4te")})


def test_a_variable_of_no_setting_is_told_with_the_nearest() -> None:
    assert unknown_variables({"DILOCO_KEPE": "1", "DILOCO_KEEP": "1", "DILOCO_CONFIG": "", "HOME": "/"}) == [
        "the environment variable DILOCO_KEPE has no effect: no setting has this name; did you mean DILOCO_KEEP?"
    ]


# The model ------------------------------------------------------------------------------------------------------------
def test_every_setting_has_a_section_and_each_spelling_is_one_settings_own() -> None:
    sections = [setting.name for section in JoinSettings.SECTIONS for setting in settings_of(section)]
    assert sorted(sections) == sorted(setting.name for setting in settings_of(JoinSettings))
    for spelling in ("option", "variable"):
        said = [getattr(setting, spelling) for setting in SETTINGS]
        assert len(set(said)) == len(said)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_says_what_it_means(setting: Any) -> None:
    assert setting.help.endswith(".")


def test_the_help_of_name_says_what_is_accepted() -> None:
    [name] = [setting for setting in SETTINGS if setting.name == "name"]
    assert f"at most {NICKNAME_LENGTH} printable ASCII characters" in name.help


def test_workers_get_their_settings() -> None:
    settings = JoinSettings(run="x", device="cpu", cpu_workers=3, tf32=True)
    expected = WorkerOptions(device="cpu", cpu_workers=3, tf32=True, threads=None, restarts=3)
    assert replace(settings.workers, compile_cache=None) == expected
    elsewhere = replace(settings, state=Path("/state"))
    assert elsewhere.workers.compile_cache == "/state/compiled"


def test_a_process_that_goes_by_its_command_line_alone_sees_no_settings() -> None:
    environment = without_settings({"DILOCO_KEEP": "1", "DILOCO_KERNELS": "scalar"})
    assert environment == {"DILOCO_KERNELS": "scalar", "DILOCO_CONFIG": "/dev/null"}
