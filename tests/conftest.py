"""Settings that all tests share, and what each must leave as it was."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from opendiloco.cli.logs import OURS, PLACE
from peers.metrics import HEALTH

# Several processes share the machine's cores in many tests; more threads than that make everything slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Of the hundreds of commands that tests start, only the first need compile our modules. And pytest keeps what it makes
# of the modules of tests, which takes half of the time to collect them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["DILOCO_CONFIG"] = os.devnull  # whoever runs the tests may have settings of their own
os.environ["DILOCO_LOCAL_NETWORK"] = "no"  # nor is it the local network's business

if "PYTEST_XDIST_WORKER" in os.environ:  # whose tests look for what theirs have left in the folder for temporary files
    own_folder = tempfile.mkdtemp(prefix="tests-")
    atexit.register(shutil.rmtree, own_folder, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = own_folder

# Ctrl-C ends what tests start, though a shell that runs the tests in the background has it ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Simulated swarms keep all that they say. To look through it for garbage as often as usual takes a fifth of the time.
gc.set_threshold(50_000, 10, 10)

# No deadline for an example: the time that one takes says more about the machine's load than about our code.
settings.register_profile("diloco-peer", deadline=None, derandomize=True, database=None)
settings.load_profile("diloco-peer")


LONGEST = (
    "test_nat.py",
    "test_wrong_input.py",
    "test_swarm_benchmarks.py",
    "test_leaving.py",
    "test_liars.py",
    "test_outliving.py",
    "test_demo.py",
    "test_faults.py",
    "test_by_hand.py",
    "test_archives.py",
    "test_reference.py",
    "test_copied_key.py",
    "test_without_bootstrap.py",
    "test_moments_file.py",
    "test_hivemind_transport.py",
    "test_group.py",
    "test_driver.py",
    "test_joining.py",
)
"""Files of tests of real processes that take long, longest first: nobody is to begin with one when all others end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


IMPORTED_AT_ONCE = 200
"""Modules that a library brings with it whose objects are worth keeping out of the search for garbage."""
modules_frozen = 0


def freeze() -> None:
    """Keep all that there is out of the search for garbage. What is imported and collected stays to the end, and to
    search it takes up to half a second, whenever a test wants that, and now and then in any other."""
    global modules_frozen
    gc.freeze()
    modules_frozen = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Between two tests, when the last one was the first that needed a large library."""
    if len(sys.modules) >= modules_frozen + IMPORTED_AT_ONCE:
        gc.collect()
        freeze()


@pytest.fixture(autouse=True)
def the_neighbourhood_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is near the machine that runs the tests is no business of theirs: neither other nodes, nor its router."""

    def local_interfaces() -> list[str]:
        raise AssertionError("the test would talk to the local network")

    class PortMapper:
        def __init__(self, *arguments: object) -> None:
            raise AssertionError("the test would ask the router of this machine for a port: listen on 127.0.0.1")

    monkeypatch.setattr("peers.network.neighbours._local_interfaces", local_interfaces)
    monkeypatch.setattr("peers.network.links.PortMapper", PortMapper)


@pytest.fixture(autouse=True)
def the_process_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without the signs of life that an earlier one in the same process has promised."""
    monkeypatch.setattr(HEALTH, "_due", {})
    monkeypatch.setattr(HEALTH, "_failures", {})


@pytest.fixture(autouse=True)
def signals_are_not_blocked() -> Iterator[None]:
    """A blocked Ctrl-C is inherited by each process that a later test starts, and nobody could end it politely."""
    yield
    left = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    assert not left, f"the test has left signals blocked: {left}"


@pytest.fixture(autouse=True)
def loggers_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands that tests run in this process choose what our loggers and the root logger let through, and the run, the
    peer and the outer step that log lines name."""
    for name, value in vars(PLACE).items():
        monkeypatch.setattr(PLACE, name, value)
    levels = {name: logging.getLogger(name).level for name in (*OURS, "")}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
