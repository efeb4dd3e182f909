"""`diloco-peer anchor`: whose log is signed, and what it goes by."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from opendiloco.cli.anchor import check_key, show_log, sign
from opendiloco.errors import NotAnchoredError
from opendiloco.run import Run as ManifestRun
from peers.errors import ManifestError, SwarmUnreachableError
from peers.net.transport import HivemindTransport
from peers.values.anchors import AnchoredHead, Anchors
from peers.values.identity import Identity
from peers.values.signing import IdentityKeys
from tests.peers.builders import RUN, SETTINGS
from tests.peers.transfer.test_following import Donor, Run, Swarm

ORGANISER, ARCHIVE = Identity.generate(), Identity.generate()
KNOWN = Anchors(RUN, (ORGANISER.peer_id, ARCHIVE.peer_id))
RUN_OF_SWARM = cast(
    ManifestRun,
    SimpleNamespace(run_id=RUN, settings=SETTINGS, manifest=SimpleNamespace(anchors=KNOWN.keys)),
)
OURS, THEIRS = Run(6, b"ours", tokens=10), Run(9, b"theirs", tokens=1000)


async def swarm_of(**runs: Run) -> HivemindTransport:
    swarm = Swarm()
    for name, run in runs.items():
        await swarm.add(name, Donor(run, frozen=1))
    swarm.anchors = KNOWN
    return cast(HivemindTransport, swarm)


def head(index: int, run: Run, by: Identity) -> AnchoredHead:
    return AnchoredHead.sign(RUN, index, run.logs[index].position.head, by.peer_id, IdentityKeys(by))


def test_the_log_that_all_peers_have_is_shown() -> None:
    async def scenario() -> None:
        transport = await swarm_of(a=OURS, b=OURS)
        shown = await show_log(RUN_OF_SWARM, transport, KNOWN, None)
        assert shown.heads_at([6]) == {6: OURS.logs[6].position.head}

    asyncio.run(scenario())


def test_where_there_are_several_a_person_says_whose_it_is() -> None:
    async def scenario() -> None:
        transport = await swarm_of(a=OURS, x=THEIRS, y=THEIRS)
        with pytest.raises(NotAnchoredError, match=r"that of a is another one than the best\. .* with --peer"):
            await show_log(RUN_OF_SWARM, transport, KNOWN, None)
        shown = await show_log(RUN_OF_SWARM, transport, KNOWN, "a")
        assert shown.heads_at([6]) == {6: OURS.logs[6].position.head}
        with pytest.raises(SwarmUnreachableError, match="z is not there, or shows no log"):
            await show_log(RUN_OF_SWARM, transport, KNOWN, "z")

    asyncio.run(scenario())


def test_nobody_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(SwarmUnreachableError, match="nobody shows a log of tiny"):
            await sign(RUN_OF_SWARM, await swarm_of(), ORGANISER, tmp_path, None, uncertified=True)

    asyncio.run(scenario())


def test_the_organiser_may_overrule_a_key_that_was_stolen_and_not_the_other_way_round(tmp_path: Path) -> None:
    async def scenario() -> None:
        transport = await swarm_of(a=OURS, x=THEIRS)
        cast(Swarm, transport).anchors = KNOWN.with_heads([head(4, THEIRS, ARCHIVE)])
        signed = await sign(RUN_OF_SWARM, transport, ORGANISER, tmp_path, "a", uncertified=True)
        assert signed == head(6, OURS, ORGANISER)
        cast(Swarm, transport).anchors = cast(Swarm, transport).anchors.with_heads([signed])
        assert await sign(RUN_OF_SWARM, transport, ORGANISER, tmp_path, "a", uncertified=True) == signed, "told again"
        with pytest.raises(SwarmUnreachableError, match="has signed another outer step 6"):
            await sign(RUN_OF_SWARM, transport, ARCHIVE, tmp_path, "x", uncertified=True)

    asyncio.run(scenario())


def test_what_too_few_have_signed_is_signed_only_on_demand(tmp_path: Path) -> None:
    async def scenario() -> None:
        transport = await swarm_of(a=OURS)
        with pytest.raises(NotAnchoredError, match="entry 0 is not certified"):
            await sign(RUN_OF_SWARM, transport, ORGANISER, tmp_path, None, uncertified=False)
        assert await sign(RUN_OF_SWARM, transport, ORGANISER, tmp_path, None, uncertified=True)

    asyncio.run(scenario())


def test_only_an_anchor_signs() -> None:
    check_key(RUN_OF_SWARM, ARCHIVE)
    with pytest.raises(ManifestError, match="Name the key file of an anchor with --identity"):
        check_key(RUN_OF_SWARM, Identity.generate())
