"""Signatures of heads of a run's log, by one of the run's archives.

An archive signs only what it has checked itself: entries that are all certified, from the manifest or from the newest
head that it has signed before. Its own heads are on one branch. So the newest one is on the disk before it is sent, and
heads that its key has signed on another machine bind it as soon as they are known here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.errors import DilocoPeerError
from peers.log.certificate import prove
from peers.log.folder import RunLog
from peers.log.state import LogError
from peers.values.identity import Keys
from peers.values.signed_heads import HEADS_BYTES, SignedHead, SignedHeads
from peers.values.system import make_private_folder, write_whole
from peers.values.wire import WireError, pack, unpack

SIGNED = "signed"
"""The name of the file, in an archive's folder of the run."""
STRETCH = 256  # maximum number of cycles that one call of `sign` checks


class SignedFileError(DilocoPeerError):
    """Error: the file with an archive's last signed head cannot be read or written, so the archive must not sign."""

    exit_code = 6


class CannotSignError(LogError):
    """Error: an archive must not sign a log. The message is the end of a sentence about the log."""


class HeadSigner:
    """The signer of heads of one run's log, for the archive on this machine. Not thread-safe."""

    def __init__(self, run: str, me: str, keys: Keys, folder: Path) -> None:
        """Create a signer with the archive's last signed head, read from `folder`. Raises: SignedFileError when that
        head cannot be read."""
        self._run = run
        self._me = me
        self._keys = keys
        self._path = folder / SIGNED
        self.last = self._read()
        """The furthest head that this archive has signed, as far as this machine knows."""

    def sign(self, log: RunLog, known: SignedHeads) -> SignedHead | None:
        """Sign the newest head of `log` that this archive may sign, and return it; None if nothing new can be signed.

        One call checks a limited number of entries, so many entries take several calls. If another archive has signed a
        different head at an index of this log, this archive signs its own head at that index, to show that the two keys
        contradict each other.

        Raises:
            CannotSignError: the log must not be signed.
            SignedFileError: the head is not on the disk, and must not be sent.
        """
        own = [*known.only(self._me).believed, *([self.last] if self.last else [])]
        heads = log.heads_at({*known.indices, *(one.index for one in own)})
        self._check(log, known, own, heads)
        other = known.contradiction(heads)
        checked = max((one.index for one in own), default=0)
        wanted = log.next_index if other is None else other.index
        if wanted > checked:
            wanted = self._certified_until(log, checked, wanted)
        elif other is None:
            return None
        signed = SignedHead.sign(self._run, wanted, log.heads_at([wanted])[wanted], self._me, self._keys)
        # store only the head with the highest index, because each head depends on all earlier entries
        if self.last is None or signed.index > self.last.index:
            self._write(signed)
            self.last = signed
        return signed

    def _check(self, log: RunLog, known: SignedHeads, own: Sequence[SignedHead], heads: Mapping[int, bytes]) -> None:
        """Raise CannotSignError if the log contradicts a head that an archive has signed, or ends before that head."""
        if self._me in known.disbelieved:
            step = known.disbelieved[self._me]
            raise CannotSignError(f"this key does not count any more: outer step {step} is signed twice")
        for one in own:
            if one.index > log.next_index:
                raise CannotSignError(f"it ends before outer step {one.index}, which this key has signed")
            if heads.get(one.index) != one.head:
                raise CannotSignError(f"this key has signed another outer step {one.index}")
        if own:
            return
        if (other := known.contradiction(heads)) is not None:
            raise CannotSignError(f"the archive {other.archive} has signed another outer step {other.index}")
        # a log that ends before the newest signed head may be on another branch than that head
        if (newest := known.newest) is not None and newest.index > log.next_index:
            raise CannotSignError(f"it ends before outer step {newest.index}, which {newest.archive} has signed")

    def _certified_until(self, log: RunLog, first: int, last: int) -> int:
        """Check the certificates of entries from cycle `first` on, at most up to `last`. Return the index up to which
        all entries are certified. Raises: CannotSignError when not even entry `first` is certified."""
        before = log.log_after(first)
        if before is None:
            raise CannotSignError(f"its entries before {first} are missing here")
        index = first
        for header in log.headers(first, min(last, first + STRETCH)):
            certificate, at = log.certificate_at(header.index, header.fragment), before.of(header.fragment)
            if certificate is None or not prove(certificate, at, header, self._keys.verify).is_certified:
                break
            before = before.append(header)
            index = before.position.index
        if index == first:
            raise CannotSignError(f"entry {index} is not certified: no quorum has signed it")
        return index

    # On the disk ----------------------------------------------------------------------------------------------
    def _read(self) -> SignedHead | None:
        try:
            signed = unpack(SignedHead, self._path.read_bytes(), HEADS_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, WireError) as error:
            raise self._unusable(str(error)) from error
        if signed.archive != self._me or not signed.is_signed(self._run, self._keys.verify):
            raise self._unusable("it is for another key or run")
        return signed

    def _write(self, signed: SignedHead) -> None:
        """Write the head to the archive's file on the disk, whole and durable. Raises: SignedFileError."""
        try:
            make_private_folder(self._path.parent)
            write_whole(self._path, [pack(signed)], is_durable=True)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error

    def _unusable(self, reason: str) -> SignedFileError:
        return SignedFileError(
            f"the file of this archive's last signed head, {self._path}, cannot be used: {reason}.",
            "Make room there, or restore it from a copy; without it an archive could sign two logs.",
        )
