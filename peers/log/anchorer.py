"""Signing heads of a run's log as one of its anchors.

An anchor signs what it has checked itself: entries that are all certified, from the manifest or from the newest head on
that anchors have signed before. Its own heads lie on one branch. So the newest is on the disk before anybody hears of
it, and what it has signed on another machine binds it as soon as it is known here.
"""

from __future__ import annotations

from pathlib import Path

from peers.errors import DilocoPeerError
from peers.log.certificate import prove
from peers.log.folder import RunLog
from peers.log.state import LogError
from peers.values.anchors import HEADS_BYTES, AnchoredHead, Anchors
from peers.values.identity import verify as verify_signature
from peers.values.private_folders import make_private_folder
from peers.values.signing import Keys, Verify
from peers.values.whole_files import write_whole
from peers.values.wire import WireError, pack, unpack

ANCHORED = "anchored"
"""The name of the file, in an anchor's folder of the run."""
STRETCH = 256  # cycles that are checked at once


class AnchorFileError(DilocoPeerError):
    """What an anchor has signed can't be read or written, so that it must not sign anything more."""

    exit_code = 6


class CannotAnchorError(LogError):
    """Why an anchor does not sign a log, as the end of a sentence about it."""


class Anchorer:
    """One anchor of one run. Its methods are for one thread at a time."""

    def __init__(self, run: str, me: str, keys: Keys, folder: Path, verify: Verify = verify_signature) -> None:
        """Raises: AnchorFileError when what the anchor signed last, in `folder`, can't be read."""
        self._run = run
        self._me = me
        self._keys = keys
        self._path = folder / ANCHORED
        self._verify = verify
        self.last = self._read()
        """What it has signed last, as far as this machine knows."""

    def sign(self, log: RunLog, known: Anchors, takes_uncertified: bool = False) -> AnchoredHead | None:
        """Sign the newest head of `log` that may be signed; None: there is nothing new to sign.

        It comes further each time, where many entries are to be checked. With `takes_uncertified` a person says that
        the log is the run's, though too few have signed some of its entries.

        Raises: CannotAnchorError; AnchorFileError, after which others must not hear of it.
        """
        first, end = self._anchored_until(log, known), log.next_index
        last = end if takes_uncertified else self._certified_until(log, first, end)
        if last <= first:
            return None
        signed = AnchoredHead.sign(self._run, last, log.heads_at([last])[last], self._me, self._keys)
        self._write(signed)
        self.last = signed
        return signed

    def _anchored_until(self, log: RunLog, known: Anchors) -> int:
        """Return up to where we or other anchors have signed the log. Raises: CannotAnchorError where one of its heads
        is not the one that was signed."""
        if self._me in known.liars:
            raise CannotAnchorError("this key has signed two logs, and nobody believes it any more")
        ours = [*known.believed.get(self._me, ()), *([self.last] if self.last else [])]
        heads = log.heads_at({*known.indices, *(one.index for one in ours)})
        for one in ours:
            if one.index > log.next_index:
                raise CannotAnchorError(f"it has not come to outer step {one.index}, which this key has signed")
            if heads.get(one.index) != one.head:
                raise CannotAnchorError(f"this key has signed another outer step {one.index}")
        if (other := known.contradiction(heads)) is not None:
            raise CannotAnchorError(f"the anchor {other.anchor} has signed another outer step {other.index}")
        ahead = [] if ours else [head for head in known.before(self._me) if head.index > log.next_index]
        if ahead:  # it may be another log, which has not come so far
            raise CannotAnchorError(
                f"it has not come to outer step {ahead[-1].index}, which {ahead[-1].anchor} has signed"
            )
        every = [*ours, *(one for signed in known.believed.values() for one in signed)]
        return max((one.index for one in every if heads.get(one.index) == one.head), default=0)

    def _certified_until(self, log: RunLog, first: int, last: int) -> int:
        """Return up to where entries are certified, from `first` on. Raises: CannotAnchorError when not even the next
        one is."""
        before = log.log_after(first)
        if before is None:
            raise CannotAnchorError(f"its entries before {first} are not here")
        index = first
        for header in log.headers(first, min(last, first + STRETCH)):
            certificate, at = log.certificate_at(header.index, header.fragment), before.of(header.fragment)
            if certificate is None or not prove(certificate, at, header, self._verify).is_certified:
                break
            before = before.append(header)
            index = before.position.index
        if index == first < last:
            raise CannotAnchorError(f"entry {index} is not certified: too few have signed it")
        return index

    # On the disk ----------------------------------------------------------------------------------------------
    def _read(self) -> AnchoredHead | None:
        try:
            signed = unpack(AnchoredHead, self._path.read_bytes(), HEADS_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, WireError) as error:
            raise self._unusable(str(error)) from error
        if signed.anchor != self._me or not signed.is_signed(self._run, self._verify):
            raise self._unusable("it is of another key or run")
        return signed

    def _write(self, signed: AnchoredHead) -> None:
        """Put it on the disk, whole and for good. Raises: AnchorFileError."""
        try:
            make_private_folder(self._path.parent)
            write_whole(self._path, [pack(signed)], is_durable=True)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error

    def _unusable(self, reason: str) -> AnchorFileError:
        return AnchorFileError(
            f"{self._path}, which says what this anchor has signed, cannot be used: {reason}.",
            "Make room there, or restore it from a copy; without it an anchor could sign two logs.",
        )
