"""libp2p's daemon as a process: out of reach of our terminal, and a clear error when it cannot be run."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from stat import S_IMODE

import pytest

from peers.errors import LocalNetworkError
from peers.network import daemon
from peers.network.daemon import P2P, Daemon, Exposure, start_daemon, stop_daemon
from peers.values.identity import Identity

pytestmark = pytest.mark.swarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def start() -> Daemon:
    return await start_daemon(Identity.generate(), (), LOOPBACK, (), client_mode=False, exposure=Exposure.LOCAL)


def test_it_has_a_session_of_its_own() -> None:
    """Neither Ctrl-C nor a hang-up reaches it: it would end before we can tell anybody that we leave."""

    async def story() -> None:
        daemon = await start()
        try:
            process = daemon._child.pid
            assert Path(f"/proc/{process}/comm").read_text() == "p2pd\n"
            assert os.getsid(process) == process
        finally:
            await stop_daemon(daemon)

    asyncio.run(story())


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "cause"), [(None, "No such file"), (0o644, "Permission"), (0o755, "Exec format")])
def test_a_daemon_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None, cause: str
) -> None:
    program = tmp_path / "p2pd"
    if mode is not None:
        program.write_bytes(b"nothing that this machine runs")
        program.chmod(mode)
    monkeypatch.setattr(P2P, "_make_process_args", staticmethod(lambda *args, **options: [str(program)]))
    with pytest.raises(LocalNetworkError, match=f"cannot be run: .*{cause}") as caught:
        asyncio.run(start())
    assert "Reinstall hivemind" in caught.value.remedy


@pytest.mark.thorough
def test_its_sockets_are_out_of_reach_of_other_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are there while it lives, whoever sweeps; its key only while it starts."""
    monkeypatch.setattr(daemon, "TEMPORARY", folder := Path(tempfile.mkdtemp(dir="/tmp")))

    async def story() -> None:
        one = await start()
        daemon.sweep_sockets()
        [private] = folder.iterdir()
        assert S_IMODE(private.stat().st_mode) == 0o700
        assert [path.is_socket() for path in private.iterdir()] == [True]
        await stop_daemon(one)

    mask = os.umask(0)
    try:
        asyncio.run(story())
    finally:
        os.umask(mask)
    folder.rmdir()  # which has to be empty


def test_no_room_for_its_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(daemon, "TEMPORARY", tmp_path / "nowhere")
    with pytest.raises(LocalNetworkError, match=f"{tmp_path}/nowhere: No such file") as caught:
        asyncio.run(start())
    assert "TMPDIR" in caught.value.remedy
