"""The network side of hivemind is loaded without torch, and the rest of hivemind still works afterwards."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_SHM = """
import multiprocessing.synchronize, os
def refuse(*arguments): raise OSError(30, os.strerror(30))
multiprocessing.synchronize._multiprocessing.SemLock = refuse
from opendiloco.cli import main
main(["bootstrap", "--identity", "/dev/null/no.pem"])
"""

LOAD_LIGHT = """
import sys
from peers.network.hivemind_lite import load_hivemind
modules = load_hivemind()
assert modules.node.DHTNode and modules.p2p.P2P and modules.p2p.PeerID
assert "torch" not in sys.modules
import hivemind
assert "torch" not in sys.modules
assert load_hivemind() == modules
print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
"""

THEN_USE_ALL = """
import hivemind.utils
from hivemind import DHT, Optimizer
from hivemind.dht import DHTNode
assert "torch" in sys.modules
assert hivemind.DHT is DHT and hivemind.__version__
assert DHTNode is modules.node.DHTNode and hivemind.p2p.P2P is modules.p2p.P2P
assert hivemind.utils.MPFuture
assert not hasattr(hivemind, "nothing_like_this")
"""

LOAD_AFTER_HIVEMIND = """
from hivemind.dht import DHTNode
from peers.network.hivemind_lite import load_hivemind
assert load_hivemind().node.DHTNode is DHTNode
"""

LOGS_THROUGH_ROOT = """
import logging, sys
logging.basicConfig(format="ours: %(levelname)s %(message)s", stream=sys.stdout)
from peers.network.hivemind_lite import load_hivemind
load_hivemind()
logging.getLogger("hivemind.dht.node").warning("careful")
logging.getLogger("hivemind.dht.node").info("chatter")
"""


def run(code: str) -> str:
    """Output of Python code in a fresh interpreter. 60 s: importing torch takes a while on a loaded machine."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_without_torch_and_small() -> None:
    resident_kilobytes = int(run(LOAD_LIGHT))
    assert resident_kilobytes < 100_000  # 40,000 when written; torch alone is 200,000 more


def test_whole_hivemind_afterwards() -> None:
    run(LOAD_LIGHT + THEN_USE_ALL)


def test_whole_hivemind_before() -> None:
    run(LOAD_AFTER_HIVEMIND)


def test_messages_go_through_the_root_logger() -> None:
    assert run(LOGS_THROUGH_ROOT) == "ours: WARNING careful\n"


def test_a_machine_without_shared_memory_is_told_to_mount_it() -> None:
    """Regression: a read-only /dev/shm was called a bug of ours."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_SHM], capture_output=True, text=True)
    assert done.returncode == 5
    assert "/dev/shm cannot be used (Read-only file system)" in done.stderr
    assert "mount -t tmpfs tmpfs /dev/shm" in done.stderr
