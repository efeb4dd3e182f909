"""How a machine that is not the first comes to its volunteer: torchrun's store says where the first one is."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Mapping
from contextlib import suppress

from opendiloco.cores import usable_cores
from opendiloco.errors import IslandError
from opendiloco.island.environment import Placement
from opendiloco.island.frames import (
    BUFFER,
    REMEDY,
    Ended,
    Frame,
    Hello,
    Kind,
    Place,
    Reason,
    parse,
    read_frame,
    write_frame,
)
from opendiloco.island.greeting import (
    GREETING_SECONDS,
    SECRET_BYTES,
    TELLING_SECONDS,
    end_key,
    key_of,
    proof,
    tell_end,
    versions,
)
from opendiloco.island.store import PATIENCE, StoreClient, store_client
from peers.values.wire import printable

AGAIN_SECONDS = 0.5
BELIEVING_SECONDS = 30.0
"""What the store says in the beginning may be of an earlier start, of which we were no part."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(
    placement: Placement, run: str, kept: Mapping[str, int] | None = None, leaving: asyncio.Event | None = None
) -> Connection:
    """Return a connection to the first machine, which has let us in. For what is `kept` see `Hello`.

    When cancelled, or once `leaving` is set, the others are told; but who is let in just then has to tell the first
    machine itself.

    Raises: VolunteerLeftError; IslandError when it refuses us, or does not come, or another machine does not fit.
    """
    async with store_client(placement.host, placement.port) as store:
        arrival = _Arrival(placement, run, kept or {}, store)
        try:
            return await arrival.connect_unless(leaving or asyncio.Event())
        except (asyncio.CancelledError, _AskedError):
            await asyncio.wait([asyncio.create_task(arrival.tell_leave())], timeout=TELLING_SECONDS)
            raise


class VolunteerLeftError(IslandError):
    """Somebody has asked another machine to leave before we were let in."""


class _AskedError(VolunteerLeftError):
    """It is this machine."""

    def __init__(self) -> None:
        super().__init__("this machine was asked to leave.")


class _StaleError(Exception):
    """Somebody answers, but not who the store says, or he hangs up."""


class _Arrival:
    """A machine that wants to be let in."""

    def __init__(self, placement: Placement, run: str, kept: Mapping[str, int], store: StoreClient) -> None:
        self._placement = placement
        self._run = run
        self._kept = dict(kept)
        self._store = store
        self._dialling = asyncio.Lock()
        self._is_in = False

    async def connect_unless(self, leaving: asyncio.Event) -> Connection:
        """See `connect`."""
        coming, asked = asyncio.create_task(self.connect()), asyncio.create_task(leaving.wait())
        try:
            await asyncio.wait([coming, asked], return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return await coming
            async with self._dialling:  # the first machine may have let us in, and looks into the store no more
                if self._is_in:
                    return await coming
            raise _AskedError
        finally:
            coming.cancel()
            asked.cancel()

    async def connect(self) -> Connection:
        """Dial until the first machine lets us in."""
        began = time.monotonic()
        while True:
            place = await self._place()
            try:
                async with self._dialling:
                    connection = await self._dial(place)
                    self._is_in = True
                return connection
            except (OSError, TimeoutError, _StaleError) as error:  # what the store says is of an earlier start
                if time.monotonic() - began > PATIENCE.total_seconds():
                    raise IslandError(
                        f"the first machine, at {self._placement.host}, does not answer: {error}.", REMEDY
                    ) from error
            if time.monotonic() - began > BELIEVING_SECONDS:
                await self._check_end(place)
            await asyncio.sleep(AGAIN_SECONDS)

    async def tell_leave(self) -> None:
        """Tell the others that this machine leaves."""
        with suppress(IslandError):
            place = await self._place()
            await tell_end(self._store, bytes.fromhex(place.secret), Ended(by=f"node {self._placement.rank}"))

    async def _place(self) -> Place:
        return parse(Place, (await self._store.get(key_of(self._placement.job))).encode())

    async def _check_end(self, place: Place) -> None:
        """Raises: VolunteerLeftError or IslandError when the machines of that start will not come together."""
        key = end_key(bytes.fromhex(place.secret))
        if await self._store.has(key):
            ended = parse(Ended, (await self._store.get(key)).encode())
            if ended.reason is not None:
                raise IslandError(*ended.reason.said)
            raise VolunteerLeftError(f"{printable(ended.by)} of this volunteer was asked to leave.")

    async def _dial(self, place: Place) -> Connection:
        """Return the connection that a start's first machine lets us have.

        Raises: OSError, TimeoutError, _StaleError when it does not answer; IslandError when it refuses us.
        """
        async with asyncio.timeout(GREETING_SECONDS):
            reader, writer = await asyncio.open_connection(self._placement.host, place.port, limit=BUFFER)
            try:
                answer = await self._exchange_proofs(reader, writer, bytes.fromhex(place.secret))
            except IslandError as error:
                writer.close()
                raise _StaleError(str(error)) from error
            except BaseException:
                writer.close()
                raise
        if answer.kind is Kind.REFUSED:
            writer.close()
            raise IslandError(*parse(Reason, answer.body).said)
        return reader, writer

    async def _exchange_proofs(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes
    ) -> Frame:
        """Return what the first machine answers. Raises: IslandError when it does not show that it knows the secret."""
        challenge = bytes((await read_frame(reader, Kind.CHALLENGE)).body)
        own_challenge = os.urandom(SECRET_BYTES)
        hello = Hello(
            proof=proof(secret, challenge),
            challenge=own_challenge.hex(),
            rank=self._placement.rank,
            run=self._run,
            versions=versions(),
            cores=usable_cores(),
            kept=self._kept,
        )
        write_frame(writer, Frame(Kind.HELLO, 0, 0, hello.packed()))
        answer = await read_frame(reader, Kind.WELCOME, Kind.REFUSED)
        expected = proof(secret, challenge + own_challenge).encode()
        if answer.kind is Kind.WELCOME and not hmac.compare_digest(answer.body, expected):
            raise IslandError("it does not know the secret in torchrun's store.")
        return answer
