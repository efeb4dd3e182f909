"""What proves an entry. The signatures here are real ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain, combinations, product

import pytest

from peers.log.certificate import (
    AttemptName,
    Certificate,
    CertificateError,
    Departure,
    Farewell,
    Proof,
    Vote,
    ballot,
    certify,
    prove,
    shortened,
)
from peers.log.header import Header, Member
from peers.log.state import LogState
from peers.values.identity import Identity, verify
from peers.values.wire import digest_of, pack, unpack
from tests.peers.logs import LOG, PAYLOAD, RUN, next_header

IDENTITIES = sorted((Identity.generate() for _ in range(5)), key=lambda identity: identity.peer_id)
PEERS = [identity.peer_id for identity in IDENTITIES]
ATTEMPT = (3, PEERS[0], False)


def log_of(number: int) -> LogState:
    """The log after a first entry of so many members, each in an incarnation of its own."""
    roster = [
        Member(peer=peer, tokens=100, samples=LOG.grants[place], incarnation=7 + place)
        for place, peer in enumerate(PEERS[:number])
    ]
    return LOG.append(next_header(LOG, roster, PAYLOAD))


def next_of(log: LogState, payload: bytes = PAYLOAD) -> Header:
    return next_header(log, [log.expected(peer) for peer in log.roster], payload)


def voted(header: Header, places: Iterable[int], attempt: AttemptName = ATTEMPT, started: int = 7) -> dict[str, bytes]:
    """Signatures by the members at these places. `started`: the incarnation of the first of all."""
    texts = {place: ballot(header, attempt, started + place).text for place in places}
    return {PEERS[place]: IDENTITIES[place].sign(text) for place, text in texts.items()}


def gone(places: Iterable[int], index: int, started: int = 7) -> dict[str, tuple[int, bytes]]:
    """Farewells of the members at these places, which have signed nothing from `index` on."""
    departures = (
        (place, Departure(run=RUN, peer=PEERS[place], incarnation=started + place, index=index)) for place in places
    )
    return {PEERS[place]: (index, IDENTITIES[place].sign(departure.text)) for place, departure in departures}


def proof(
    log: LogState, header: Header, signatures: dict[str, bytes], farewells: dict[str, tuple[int, bytes]] | None = None
) -> Proof:
    certificate = certify(log, header, ATTEMPT, signatures, farewells or {})
    return prove(unpack(Certificate, pack(certificate)), log, header, verify)


@pytest.mark.parametrize(
    ("members", "signers", "leavers", "is_certified"),
    [
        (1, "0", "", True),
        (2, "0", "", False),
        (2, "0", "1", True),
        (3, "02", "", True),
        (3, "1", "02", True),
        (4, "01", "", False),
        (4, "01", "3", True),
        (5, "012", "", True),
        (5, "01", "34", True),
        (5, "01", "3", False),
        (2, "", "01", False),
    ],
)
def test_more_than_half_of_those_who_have_not_left(
    members: int, signers: str, leavers: str, is_certified: bool
) -> None:
    log = log_of(members)
    header = next_of(log)
    found = proof(log, header, voted(header, map(int, signers)), gone(map(int, leavers), 1))
    assert found == Proof(is_certified, len(signers))


def test_a_farewell_counts_from_its_entry_on() -> None:
    """Who left after entry 1 may have signed it."""
    log = log_of(2)
    header = next_of(log)
    late = Farewell(place=1, index=2, signature=gone([1], 2)[PEERS[1]][1])
    certificate = certify(log, header, ATTEMPT, voted(header, [0]), gone([1], 2))
    assert not certificate.farewells
    with pytest.raises(CertificateError, match="left later, at 2"):
        prove(certificate.model_copy(update={"farewells": (late,)}), log, header, verify)


def test_the_first_entry_is_signed_by_most_of_its_own_members() -> None:
    header = log_of(3).last
    assert header is not None
    assert proof(LOG, header, voted(header, [1, 2])) == Proof(True, 2)
    assert proof(LOG, header, voted(header, [0])) == Proof(False, 1)


def test_a_name_has_one_vote_whichever_of_two_machines_with_its_key_signs() -> None:
    """Only the incarnation that the roster names counts, and it once: the copy's signature is of something else."""
    log = log_of(3)
    header = next_of(log)
    ours, copys = voted(header, [0])[PEERS[0]], voted(header, [0], started=99)[PEERS[0]]
    assert prove_votes(log, header, (0, ours)) == Proof(False, 1)
    with pytest.raises(CertificateError, match=f"the signature of {PEERS[0]} is not its own"):
        prove_votes(log, header, (0, copys))
    for twice in (((0, ours), (0, copys)), ((0, ours), (0, ours))):
        with pytest.raises(CertificateError, match="names places that the roster does not have"):
            prove_votes(log, header, *twice)
    with pytest.raises(CertificateError, match=f"the signature of {PEERS[1]} is not its own"):
        prove_votes(log, header, (0, ours), (1, copys))


def prove_votes(log: LogState, header: Header, *votes: tuple[int, bytes]) -> Proof:
    """What signatures at these places prove."""
    number, leader, alone = ATTEMPT
    given = tuple(Vote(place=place, signature=signature) for place, signature in votes)
    return prove(Certificate(number=number, leader=leader, alone=alone, votes=given, farewells=()), log, header, verify)


def test_a_certificate_is_no_longer_than_it_need_be() -> None:
    log = log_of(5)
    header = next_of(log)
    certificate = shortened(certify(log, header, ATTEMPT, voted(header, range(5)), gone([4], 1)), log, header)
    assert [vote.place for vote in certificate.votes] == [0, 1, 2]
    certificate = certify(log, header, ATTEMPT, voted(header, [0, 2, 3]), gone([1, 4], 1))
    assert not certificate.farewells


def test_a_whole_certificate_shows_all_votes_until_it_is_shortened() -> None:
    log = log_of(5)
    header = next_of(log)
    whole = certify(log, header, ATTEMPT, voted(header, range(4)), gone([4], 1))
    assert [vote.place for vote in whole.votes] == [0, 1, 2, 3]
    assert prove(whole, log, header, verify).is_certified
    assert [vote.place for vote in shortened(whole, log, header).votes] == [0, 1, 2]
    few = certify(log, header, ATTEMPT, voted(header, [0, 1]), gone([3, 4], 1))
    assert shortened(few, log, header) == few


def lies(log: LogState, header: Header) -> dict[str, Certificate]:
    other = next_of(log, digest_of(b"another"))
    number, leader, _ = ATTEMPT

    def of(signatures: dict[str, bytes]) -> Certificate:
        return certify(log, header, ATTEMPT, signatures, {})

    first, second = of(voted(header, [0, 1])).votes
    return {
        "of another entry": of(voted(other, [0, 1])),
        "of another attempt": of(voted(header, [0], (number + 1, leader, False))),
        "of another leader's attempt": of(voted(header, [0], (number, PEERS[1], False))),
        "of an attempt alone": of(voted(header, [0], (number, leader, True))),
        "of another incarnation": of(voted(header, [0], started=8)),
        "of somebody else": of({PEERS[0]: second.signature}),
        "one signature twice": of({}).model_copy(update={"votes": (first, first)}),
        "of nobody": of({}).model_copy(update={"votes": (Vote(place=3, signature=first.signature),)}),
        "a farewell in another incarnation": certify(log, header, ATTEMPT, {}, gone([0], 1, started=8)),
        "a farewell that is a vote": certify(log, header, ATTEMPT, {}, {PEERS[0]: (1, first.signature)}),
        "signed and gone": of(voted(header, [0])).model_copy(
            update={"farewells": certify(log, header, ATTEMPT, {}, gone([0], 1)).farewells}
        ),
    }


@pytest.mark.parametrize("lie", lies(log_of(3), next_of(log_of(3))))
def test_a_false_signature_is_no_certificate(lie: str) -> None:
    log = log_of(3)
    header = next_of(log)
    with pytest.raises(CertificateError):
        prove(lies(log, header)[lie], log, header, verify)


def test_what_a_minority_made_is_not_certified_because_somebody_left_meanwhile() -> None:
    """Regression: a farewell that came while it went on alone made two of four two of three; others certified another
    entry."""
    log = log_of(4)
    header = next_of(log)
    alone = (*ATTEMPT[:2], True)
    certificate = certify(log, header, alone, voted(header, [0, 1, 2], alone), gone([3], 1))
    assert prove(certificate, log, header, verify) == Proof(False, 3)


def test_nobody_has_left_before_the_first_entry() -> None:
    header = log_of(2).last
    assert header is not None
    certificate = certify(LOG, header, ATTEMPT, voted(header, [0]), {})
    farewell = Farewell(place=1, index=0, signature=gone([1], 0)[PEERS[1]][1])
    with pytest.raises(CertificateError, match="before the first entry"):
        prove(certificate.model_copy(update={"farewells": (farewell,)}), LOG, header, verify)


def subsets(places: Collection[int]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(places, size) for size in range(len(places) + 1)))


@pytest.mark.parametrize("members", range(1, 6))
def test_two_certificates_of_one_place_share_a_signer(members: int) -> None:
    """Whoever has left at the place has signed nothing there, and so is in neither."""
    log = log_of(members)
    header = next_of(log)
    everybody = range(members)
    blank = bytes(64)

    def is_certified(signers: Collection[int], leavers: Collection[int]) -> bool:
        votes = tuple(Vote(place=place, signature=blank) for place in signers)
        farewells = tuple(Farewell(place=place, index=1, signature=blank) for place in leavers)
        certificate = Certificate(number=1, leader=PEERS[0], alone=False, votes=votes, farewells=farewells)
        return prove(certificate, log, header, lambda peer, text, signature: True).is_certified

    certified = [
        (set(signers), set(leavers))
        for signers, leavers in product(subsets(everybody), subsets(everybody))
        if not set(signers) & set(leavers) and is_certified(signers, leavers)
    ]
    assert certified
    for (first, gone_first), (second, gone_second) in combinations(certified, 2):
        if not first & gone_second and not second & gone_first:
            assert first & second
