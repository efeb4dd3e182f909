"""The systemd units: accepted by systemd, hardened, and restarted where another try could help."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from opendiloco.cli import machine, main
from opendiloco.cli.group import EXIT_CODES
from tests.documents import blocks
from tests.test_documentation import assert_is_a_command

ROOT = Path(__file__).parent.parent.parent
UNITS = sorted((ROOT / "systemd").glob("*.service"))
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
INVITE = f"diloco:tiny-{'a' * 32}@/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWQ"
PROGRAM = "/opt/diloco-peer/bin/diloco-peer"
MOST_EXPOSED = 25  # tenths of what `systemd-analyze security` says; 0 is closed, 96 a service without any hardening

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze, of Debian's package systemd"
)
each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)


def values(unit: Path) -> dict[str, list[str]]:
    """Return what the unit says of each key, in its order."""
    found = defaultdict(list)
    for line in unit.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            found[match[1]].append(match[2])
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder with the units as if the program were installed: systemd looks for it."""
    program = shutil.which("true")
    for unit in UNITS:
        text = unit.read_text(encoding="utf-8")
        (tmp_path / unit.name).write_text(text.replace(PROGRAM, str(program)), encoding="utf-8")
    return tmp_path


def test_there_is_one_for_a_bootstrap_node_and_one_for_a_volunteer() -> None:
    assert [unit.stem for unit in UNITS] == ["diloco-bootstrap", "diloco-volunteer"]


@needs_systemd
@each_unit
def test_systemd_accepts_the_unit(unit: Path, installed: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(installed / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@each_unit
def test_the_unit_is_hardened(unit: Path, installed: Path) -> None:
    file = str(installed / unit.name)
    command = ["systemd-analyze", "security", "--no-pager", "--offline=yes", f"--threshold={MOST_EXPOSED}", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@each_unit
def test_the_unit_runs_a_command_that_can_be_typed(unit: Path) -> None:
    [line] = values(unit)["ExecStart"]
    program, *arguments = shlex.split(line)
    assert program == PROGRAM
    if arguments[0] == "--config":  # an option of the program itself, whose file, which names the run, is not here
        arguments = [*arguments[2:], "--run", "tiny-1"]
    assert_is_a_command([argument for argument in arguments if not argument.startswith("$")])


@each_unit
def test_only_the_main_process_hears_that_it_is_to_leave(unit: Path) -> None:
    assert values(unit)["KillMode"] == ["mixed"]
    assert values(unit)["Type"] == ["exec"]
    assert "KillSignal" not in values(unit)  # SIGTERM


@each_unit
def test_errors_that_a_person_must_mend_are_not_tried_again(unit: Path) -> None:
    assert values(unit)["Restart"] == ["on-failure"]
    [line] = values(unit)["RestartPreventExitStatus"]
    final = {int(code) for code in line.split()}
    assert final <= EXIT_CODES.keys()
    assert {2, 3, 13, 15} <= final
    assert not final & {0, 1, 4, 5, 8, 70}, "another try may find the swarm, or a device that works again"


@each_unit
def test_the_documented_commands_install_the_unit(unit: Path) -> None:
    commands = "".join(blocks(OPERATING, "sh"))
    assert f"systemd/{unit.name}" in commands
    assert f"systemctl enable --now {unit.stem}" in commands
    [user] = values(unit)["User"]
    assert f"--home-dir /var/lib/{user}" in commands
    [folder] = values(unit)["StateDirectory"]
    assert user == folder == unit.stem


@each_unit
def test_code_may_be_written_while_it_runs(unit: Path) -> None:
    """libp2p's daemon, which unpacks itself, does not start without; nor does torch.compile."""
    assert "MemoryDenyWriteExecute" not in values(unit)


def test_a_user_gets_a_unit_of_its_own_that_runs_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    typed = [
        "service",
        "install",
        INVITE,
        "--hours",
        "22-07",
        "--team",
        "5 % of $ome",
        "--identity",
        "a.pem",
    ]
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 0, done.output
    unit = tmp_path / "systemd" / "user" / "diloco-volunteer.service"
    assert f"wrote {unit}." in done.output
    assert "systemctl --user daemon-reload && systemctl --user enable --now diloco-volunteer" in done.output
    [line] = values(unit)["ExecStart"]
    python, _, module, *arguments = shlex.split(line.replace("%%", "%").replace("$$", "$"))
    assert (python, module) == (sys.executable, "opendiloco.cli")
    assert arguments == ["join", "--plain", *typed[2:]]
    assert values(unit)["WorkingDirectory"] == [str(Path.cwd())], "paths are those of the folder it was typed in"


@pytest.mark.parametrize("typed", [[], ["--identity", "my.pem"], ["--identity=my.pem"]])
def test_a_unit_of_the_machine_names_one_key(typed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a key that was named came after the default one."""
    monkeypatch.setattr(machine, "_HIDDEN", ())
    done = CliRunner().invoke(main, ["service", "install", "--system", "--print", *typed])
    assert done.exit_code == 0, done.output
    assert f" bootstrap {' '.join(typed or ['--identity', 'bootstrap.pem'])}\n" in done.output


def test_a_unit_of_the_machine_does_not_run_what_its_user_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the unit was written, and failed at each start."""
    monkeypatch.setattr(machine, "__file__", "/opt/diloco-peer/machine.py")
    for folder, code in {"/opt": 0, "/homes": 0, "/tmp": 6, "/root": 6, "/home/me": 6}.items():
        monkeypatch.setattr("sys.executable", f"{folder}/venv/bin/python")
        printed = CliRunner().invoke(main, ["service", "install", "--system", "--print"])
        assert printed.exit_code == 0, printed.output
        assert printed.stdout.startswith("# Written by"), "a warning does not spoil the unit"
        assert ("made with a Python that all users can read, such as /usr/bin/python3" in printed.stderr) is (code == 6)
        if code:
            assert CliRunner().invoke(main, ["service", "install", "--system"]).exit_code == code


@pytest.mark.parametrize("system", [False, True])
def test_the_unit_that_is_written_is_accepted_and_restarts_as_ours_do(
    system: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_HIDDEN", ())
    typed = ["--system", "--print"] if system else ["--print", INVITE]
    done = CliRunner().invoke(main, ["service", "install", *typed])
    assert done.exit_code == 0, done.output
    unit = tmp_path / "diloco-written.service"
    unit.write_text(done.output)
    ours = values(ROOT / "systemd" / "diloco-volunteer.service")
    for key in ("RestartPreventExitStatus", "SuccessExitStatus", "KillMode", "OOMPolicy"):
        assert values(unit)[key] == ours[key]
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_a_volunteers_unit_without_torch_is_written_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    done = CliRunner().invoke(main, ["service", "install", "--print", INVITE])
    assert done.exit_code == 0
    assert "needs the Python package torch, which is not installed here" in done.stderr


@pytest.mark.parametrize(("typed", "code"), [(["--ticekt", "x"], 2), ([], 2), (["diloco:tiny"], 3)])
def test_no_unit_is_written_for_what_cannot_be_typed(
    typed: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = CliRunner().invoke(main, ["service", "install", *typed])
    assert done.exit_code == code
    assert ("service install" in done.output) is (code == 2), "not the usage of `join`"
    assert not (tmp_path / "systemd").exists()


def test_no_unit_is_written_for_options_that_bootstrap_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the unit was written, and ended at once."""
    monkeypatch.setattr(machine, "_HIDDEN", ())
    refused = CliRunner().invoke(main, ["service", "install", "--system", "--print", "--max-disk", "10"])
    assert refused.exit_code == 2
    assert "give --archive FOLDER, too. See `main service install --help`" in refused.output


def test_what_the_units_user_may_not_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the unit was written without a word, and ended at once."""
    monkeypatch.setattr(machine, "_HIDDEN", ())
    typed = ["service", "install", "--system", "--print", "--archive"]
    assert not CliRunner().invoke(main, [*typed, "archive", "--directory", "/var/lib/diloco-bootstrap/runs"]).stderr
    warned = CliRunner().invoke(main, [*typed, "/srv/archive", "--data-port", "443"])
    assert warned.stderr.startswith("warning: the unit's user may not use port 443, /srv/archive. Choose ports from")


def test_a_unit_of_the_operator_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was overwritten without a word."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    typed = ["service", "install", INVITE]
    assert [CliRunner().invoke(main, typed).exit_code for _ in range(2)] == [0, 0], "its own unit is replaced"
    unit = tmp_path / "systemd" / "user" / "diloco-volunteer.service"
    unit.write_text("[Service]\nExecStart=true\n")
    refused = CliRunner().invoke(main, typed)
    assert refused.exit_code == 6
    assert f"{unit} exists, and `service install` did not write it. Move it away" in refused.output
    assert unit.read_text() == "[Service]\nExecStart=true\n"
