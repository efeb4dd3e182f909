"""The order in which a volunteer's session checks what its owner gave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.settings.join_settings import JoinSettings
from opendiloco.view.progress import Lines
from opendiloco.volunteer import volunteer as module
from opendiloco.volunteer.volunteer import Session
from peers.errors import AdmissionError
from peers.values.identity import Identity
from peers.values.manifest import Invite


@pytest.mark.parametrize(("typed", "missing"), [((), "--data FOLDER"), ((Path("/nowhere"),), "'/nowhere' is not on")])
def test_a_missing_ticket_is_reported_with_missing_text(
    typed: tuple[Path, ...], missing: str, tmp_path: Path, small_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regressions: a volunteer prepared its text for a run that did not admit it, or learned of it only later."""
    run, key = Run.sign(small_config, Identity.generate()), Identity.generate()  # its text is a folder

    @asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(cap=lambda caps: None)

    async def found(*_: object) -> Run:
        return run

    async def nothing(*_: object) -> None: ...

    async def refused(*_: object) -> None:
        raise AdmissionError("by invitation.", "Ask for a ticket.")

    for name, stub in (("find_run", found), ("ask_for_signed_heads", nothing), ("enter", refused)):
        monkeypatch.setattr(module, name, stub)
    monkeypatch.setattr(module, "connected", connected)
    settings = JoinSettings(run=run.run_id, state=tmp_path, data=typed)
    unused: Any = None
    session = Session(settings, Invite(run.run_id, ()), key, unused, unused)
    with pytest.raises(AdmissionError, match=f"^by invitation. Ask for a ticket. Also: data.source = .*{missing}"):
        asyncio.run(session.take_part(Lines(), unused))
