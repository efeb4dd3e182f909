"""Messages as bytes. The bytes are few, since sender and receiver have the same log.

Members, rosters and entries are packed relative to the log at the message's own position (short_forms.py). A receiver
at that position can read all of it. Any other receiver can read only the position, which is enough to answer with the
entry that followed there. Votes are packed in full, so that they are evidence anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol, get_type_hints

from peers.log.header import MEMBER_LIMIT, Position
from peers.log.lineage import Lineage
from peers.log.state import LogError, LogState
from peers.messages.messages import KINDS, Certified, Message, Ready, Unread
from peers.messages.short_forms import FORMS, Form
from peers.values.wire import MESSAGE_LIMIT, PROTOCOL_VERSION, WireError, decode, from_plain, pack_plain

DEFLATED_FROM = 256  # a message's body of this many bytes or more is compressed
PLACE = len(Position.model_fields)  # number of values for the position, at the start of a body


class HasLog(Protocol):
    """A peer, as `Packer` uses it: its log, and the last entries of this log as a Lineage."""

    @property
    def log(self) -> LogState: ...
    @property
    def lineage(self) -> Lineage: ...


def _forms_of(kind: type[Message]) -> dict[str, Form | None]:
    """Return the short form of each field of a kind of message, by name; None for a field without a short form. The
    position is left out."""
    hints = get_type_hints(kind, include_extras=True)
    fields = [name for name in kind.model_fields if hints[name] is not Position]
    return {name: next((form for hint, form in FORMS if hint == hints[name]), None) for name in fields}


FIELDS = {kind: _forms_of(kind) for kind in KINDS.values()}
RELATIVE = frozenset(kind for kind, forms in FIELDS.items() if any(forms.values()))
"""Kinds of messages that only a receiver at their position can read."""


# Messages ---------------------------------------------------------------------------------------------------------
def pack_message(run: str, message: Message, log: LogState | None) -> bytes:
    """Return the bytes of a message: an envelope [protocol version, run id, kind, body]. A long body is compressed.

    `log` is the log at the message's position. Raises: LogError when it is needed, and is another or None.
    """
    kind, position = type(message), message.position
    if kind in RELATIVE and (log is None or log.position != position):
        raise LogError(f"a {message.kind} about {position}, which is not in this peer's recent log")
    body: list[object] = [position.index, position.head, position.fragment]
    for name, form in FIELDS[kind].items():
        value = getattr(message, name)
        if form is not None:
            assert log is not None
            value = form.shorten(value, log)
        body.append(value)
    packed = pack_plain(body)
    content = zlib.compress(packed) if len(packed) >= DEFLATED_FROM else body
    return pack_plain([PROTOCOL_VERSION, run, message.kind, content])


def open_envelope(run: str, data: bytes) -> tuple[type[Message], Position, list[object]]:
    """Return the parts of a message that every receiver can read: its kind, its position, and the values of its other
    fields, still packed.

    Raises:
        WireError: the bytes are no message of this protocol version and this run.
    """
    envelope = decode(data)
    if not isinstance(envelope, list) or len(envelope) != 4:
        raise WireError("not a message envelope")
    version, named_run, name, content = envelope
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise WireError(f"the message has protocol version {_shown(version)}, this peer has version {PROTOCOL_VERSION}")
    if named_run != run:
        raise WireError(f"the message is of run {_shown(named_run)}, not of {run!r}")
    if not isinstance(name, str) or name not in KINDS:
        raise WireError(f"unknown kind of message {_shown(name)}")
    kind, body = KINDS[name], decode(_inflate(content)) if isinstance(content, bytes) else content
    if not isinstance(body, list) or len(body) != PLACE + len(FIELDS[kind]):
        raise WireError(f"{kind.__name__} needs {len(FIELDS[kind])} fields beside its position")
    return kind, from_plain(Position, body[:PLACE]), body[PLACE:]


def _shown(plain: object) -> str:
    """Return a short text for a value in an error message; for a list only its type, as it may be nested too deeply."""
    return f"{plain!r:.40}" if isinstance(plain, int | str) else type(plain).__name__


def unpack_message(run: str, data: bytes, log: LogState | None) -> Message | Unread | None:
    """Return the message in these bytes. `log` is the receiver's log, if any. Some kinds can be read only with the
    log at the message's position; without that log, return None for a Certified, and Unread for other kinds.

    Raises:
        WireError: the bytes are no message of this protocol version and this run.
    """
    kind, position, values = open_envelope(run, data)
    return _understand(kind, position, values, log if log is not None and log.position == position else None)


def _understand(
    kind: type[Message], position: Position, values: Sequence[object], log: LogState | None
) -> Message | Unread | None:
    """Return the message of this kind with these field values. If `log`, the log at `position`, is None, but needed
    to read them, return None for a Certified, and Unread for other kinds. Raises: WireError."""
    if log is not None:
        return _read(kind, log.position, values, log)  # equal to `position`, but compared faster, as the same object
    if kind not in RELATIVE:
        return _read(kind, position, values, log)
    return None if kind is Certified else Unread(position=position)


def _read(kind: type[Message], position: Position, values: Sequence[object], log: LogState | None) -> Message:
    """Return the message of this kind with these field values, after expanding short forms. Raises: WireError."""
    fields: dict[str, object] = {}
    for (name, form), plain in zip(FIELDS[kind].items(), values, strict=True):
        value = plain
        try:
            if form is not None:
                assert log is not None
                value = form.lengthen(plain, log)
        except (WireError, LogError) as error:
            raise WireError(f"{kind.__name__}.{name}: {error}") from error
        fields[name] = value
    if "position" in kind.model_fields:
        fields["position"] = position
    return from_plain(kind, fields)


def _inflate(data: bytes) -> bytes:
    """Return a decompressed message body. Raises: WireError unless it is complete and has at most MESSAGE_LIMIT
    bytes."""
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(data, MESSAGE_LIMIT)
    except zlib.error as error:
        raise WireError("the body is not compressed as it should be") from error
    if not inflater.eof or inflater.unused_data:
        raise WireError("the body is cut short, or too long")
    return body


class Packer:
    """Packing and unpacking of one peer's messages.

    A message to many peers is packed once: a leader's Begin and proposal have data of all members, and each member that
    fell behind gets the same entry.
    """

    def __init__(self, peer: HasLog) -> None:
        self._peer = peer
        self._run = peer.log.run
        self._last: dict[type[Message], tuple[Message, bytes]] = {}  # last packed message of each kind, with its bytes
        self._here = peer.log
        # Each sender's last Ready: its bytes, and the message that was read from them.
        self._read_here: dict[str, tuple[bytes, Message | Unread | None]] = {}

    def pack(self, message: Message) -> bytes:
        """Return the bytes of a message. Raises: LogError when the message's position is no longer in this peer's
        recent log."""
        last, packed = self._last.get(type(message), (None, b""))
        if message != last:
            packed = pack_message(self._run, message, self.log_at(message.position))
            self._last[type(message)] = message, packed
        return packed

    def unpack(self, sender: str, data: bytes) -> Message | Unread | None:
        """Return the message in these bytes (None or Unread if it cannot be read: see `unpack_message`). If they repeat
        the sender's last Ready, return the result of its first reading. Raises: WireError."""
        if self._here is not self._peer.log:
            self._here, self._read_here = self._peer.log, {}
        last, read = self._read_here.get(sender, (b"", None))
        if data == last:
            return read
        kind, position, values = open_envelope(self._run, data)
        # A certificate about an older position may show the other branch of a fork (R9).
        is_read = kind is Certified or position.is_in_cycle_of(self._peer.log.position)
        message = _understand(kind, position, values, self.log_at(position) if is_read else None)
        if kind is Ready and (sender in self._read_here or len(self._read_here) < MEMBER_LIMIT):
            self._read_here[sender] = data, message
        return message

    def log_at(self, position: Position) -> LogState | None:
        """Return the log as it was at the start of the position's cycle, with the position's fragment as the next one;
        None if the position is not in this peer's recent log."""
        log: LogState | None = self._peer.log
        if log is not None and not position.is_in_cycle_of(log.position):
            log = self._peer.lineage.start(position.head)
        is_there = log is not None and position.fragment < log.fragments
        return log.opening(position.fragment) if log is not None and is_there else None
