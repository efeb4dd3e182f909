"""libp2p's daemon as a process: out of reach of our terminal, and a clear error when it cannot be run."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from peers.errors import LocalNetworkError
from peers.net import daemon
from peers.net.daemon import P2P, Daemon, Exposure, start_daemon, stop_daemon
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
def test_a_socket_whose_owner_is_about_to_listen_is_not_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: between bind and listen a socket refuses like a dead one."""
    monkeypatch.setattr(daemon, "SOCKET_PREFIX", str(tmp_path / "x-"))
    path = str(tmp_path / "x-p2pd-1.sock")
    with socket.socket(socket.AF_UNIX) as new, socket.socket(socket.AF_UNIX) as client:
        new.bind(path)
        daemon.sweep_sockets()
        new.listen()
        client.connect(path)
    daemon.sweep_sockets()
    assert not os.path.exists(path), "now it is deserted"
