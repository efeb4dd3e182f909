"""Consecutive entries, kept in brief: any of their headers is found again, and others are told of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peers.log import chain as chain_module
from peers.log.chain import FRAMES, STRETCH_LIMIT, Chain, Entry, Stretch, follow
from peers.log.header import Header
from peers.log.state import LogError
from peers.values.wire import digest_of, pack, unpack
from tests.peers.log.test_folder import lineage, payload
from tests.peers.logs import LOG, chain_of

HEADERS = lineage(2 * FRAMES + 5)


@pytest.mark.parametrize("first", [0, 1, FRAMES, FRAMES + 3])
def test_any_header_is_found(first: int) -> None:
    chain = chain_of(HEADERS[first:])
    assert (chain.first, chain.next_index, len(chain)) == (first, len(HEADERS), len(HEADERS) - first)
    assert list(chain.headers(0, 10**6)) == HEADERS[first:]
    for index in range(-3, len(HEADERS) + 3):
        expected = HEADERS[index] if first <= index < len(HEADERS) else None
        assert list(chain.headers(index, index + 1)) == ([expected] if expected else [])
        assert chain.after(index) == (LOG if index == -1 else LOG.at(expected) if expected else None)
    assert [entry.is_whole for entry in chain.entries] == [first > 0] + [False] * (len(chain) - 1)


def test_an_entry_that_is_too_long_to_be_read_again_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's own log may have such entries, from a thousand members with long names: whoever looks at it goes on."""
    monkeypatch.setattr(chain_module, "HEADER_LIMIT", len(pack(HEADERS[1])) - 1)
    with pytest.raises(LogError, match="bytes, more than"):
        Entry.whole(HEADERS[1], None)


@pytest.mark.parametrize("cut", [1, FRAMES, FRAMES + 1, 2 * FRAMES + 1])
def test_what_was_cut_off_grows_again_otherwise(cut: int) -> None:
    chain = chain_of(HEADERS)
    chain.cut(cut)
    assert list(chain.headers(0, 10**6)) == HEADERS[:cut]
    others = lineage(FRAMES + 2, lambda index: payload(index + 100), LOG.at(HEADERS[cut - 1]))
    for header in others:
        chain.add(Entry.whole(header, None))
    assert list(chain.headers(0, 10**6)) == HEADERS[:cut] + others
    chain.cut(0)
    assert (len(chain), chain.end) == (0, LOG)


def test_an_entry_is_the_one_whose_digest_is_beside_it() -> None:
    entry = chain_of(HEADERS[:3]).entries[2]
    for wrong in (replace(entry, digest=digest_of(b"other")), replace(entry, index=3)):
        with pytest.raises(LogError):
            chain_of(HEADERS[:2]).add(wrong)
    assert chain_of(HEADERS[:2]).add(entry) == entry


# Stretches ------------------------------------------------------------------------------------------------------
def read(stretch: Stretch, known: list[Header]) -> list[Header]:
    """The headers that a peer which knows these reads from a stretch."""
    chain = chain_of(known)
    log, headers = chain.end, list[Header]()
    for told, _ in unpack(Stretch, pack(stretch), 1 << 24).contents:
        log = LOG.at(told) if isinstance(told, Header) else follow(log, told)
        headers += [log.last] if log.last else []
    return headers


@pytest.mark.parametrize("begins", [0, 2])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("first", [0, 2, 3, len(HEADERS) - 1])
def test_a_stretch_is_read_by_whom_it_is_meant_for(first: int, is_whole: bool, begins: int) -> None:
    stretch = chain_of(HEADERS[begins:]).stretch(first, first + 3, is_whole)
    if first < begins:
        assert stretch == Stretch()
        return
    assert isinstance(stretch.contents[0][0], Header) == ((first > 0 and is_whole) or first == begins == 2)
    assert read(stretch, HEADERS[:first]) == HEADERS[first : first + 3]


@pytest.mark.parametrize(("first", "last"), [(len(HEADERS), 10**9), (3, 3), (5, 2)])
def test_a_stretch_of_nothing(first: int, last: int) -> None:
    assert chain_of(HEADERS).stretch(first, last, is_whole=True) == Stretch()


def test_a_stretch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "STRETCH_LIMIT", 7)
    assert len(chain_of(HEADERS).stretch(0, 10**6, is_whole=False).contents) == 7 < STRETCH_LIMIT
    monkeypatch.setattr(chain_module, "STRETCH_BYTES", 2.5 * len(chain_of(HEADERS).entries[1].packed))
    assert len(chain_of(HEADERS).stretch(1, 10**6, is_whole=False).contents) == 2
    monkeypatch.setattr(chain_module, "STRETCH_BYTES", 1)
    assert len(chain_of(HEADERS).stretch(1, 10**6, is_whole=False).contents) == 1


@pytest.mark.parametrize("first", [1, FRAMES + 1, 2 * FRAMES])
@pytest.mark.parametrize("begins", [0, 1, FRAMES])
def test_what_leads_up_to_a_chain_is_put_before_it(first: int, begins: int) -> None:
    if begins >= first:
        return
    later = Chain(LOG)
    for header in HEADERS[first:]:
        later.add(Entry.whole(header, digest_of(b"state %d" % header.index)))
    chain = later.led_up_to(chain_of(HEADERS).stretch(begins, first, is_whole=True))
    assert list(chain.headers(0, 10**6)) == HEADERS[begins:]
    assert [entry.is_whole for entry in chain.entries] == [begins > 0] + [False] * (len(chain) - 1)
    assert [entry.state_digest for entry in chain.entries[first - begins :]] == [
        entry.state_digest for entry in later.entries
    ]
    assert (later.first, chain.end) == (first, later.end)
    assert chain.after(first) == LOG.at(HEADERS[first])
