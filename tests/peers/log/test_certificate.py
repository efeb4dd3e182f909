"""Certificates of entries, with real signatures. The rules of votes are in tests/peers/protocol/test_voting.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from peers.log.certificate import (
    Certificate,
    CertificateError,
    Choice,
    Departure,
    Farewell,
    Group,
    Phase,
    Signer,
    Support,
    certify,
    prove,
    shortened,
)
from peers.log.header import Header, Member
from peers.log.state import LogState, Quorum
from peers.values.identity import Identity, verify
from peers.values.wire import digest_of, pack, unpack
from tests.peers.logs import LOG, PAYLOAD, RUN, choice_of, next_header, votes

IDENTITIES = sorted((Identity.generate() for _ in range(5)), key=lambda identity: identity.peer_id)
PEERS = [identity.peer_id for identity in IDENTITIES]
KEYS = dict(zip(PEERS, IDENTITIES, strict=True))
Signatures = dict[tuple[str, int], bytes]


def log_of(number: int, quorum: Quorum = Quorum.MAJORITY) -> LogState:
    """The log after a first entry of so many members, each in an incarnation of its own."""
    empty = replace(LOG, quorum=quorum)
    roster = [
        Member(peer=peer, tokens=100, samples=LOG.grants[place], incarnation=7 + place)
        for place, peer in enumerate(PEERS[:number])
    ]
    return empty.append(next_header(empty, roster))


def next_of(log: LogState, payload: bytes = PAYLOAD) -> Header:
    return next_header(log, [log.expected(peer) for peer in log.roster], payload)


def voted(header: Header, places: Iterable[int], choice: Choice | None = None, started: int = 7) -> Signatures:
    """Signatures by the members at these places. `started`: the incarnation of the first of all."""
    voters = [(PEERS[place], started + place) for place in places]
    return votes(choice or choice_of(header), header, voters, lambda peer, text: KEYS[peer].sign(text))


def gone(places: Iterable[int], index: int, started: int = 7) -> dict[str, tuple[int, bytes]]:
    """Farewells of the members at these places, which have voted nowhere from `index` on."""
    departures = (
        (place, Departure(run=RUN, peer=PEERS[place], incarnation=started + place, index=index)) for place in places
    )
    return {PEERS[place]: (index, IDENTITIES[place].sign(departure.text)) for place, departure in departures}


def made(
    log: LogState, header: Header, places: Iterable[int], leavers: Iterable[int] = (), group: Group = ()
) -> Certificate:
    """Return the certificate that the members at these places make."""
    choice = choice_of(header, group=group)
    found = certify(log, header, choice, group, voted(header, places, choice), gone(leavers, 1))
    assert found is not None
    return found


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
    choice, left = choice_of(header), gone(map(int, leavers), 1)
    found = certify(log, header, choice, (), voted(header, map(int, signers)), left)
    assert (found is not None) is is_certified
    if found is not None:
        read = unpack(Certificate, pack(found))
        assert prove(read, log, header, verify) == Support(True, len(signers))


@pytest.mark.parametrize(("signers", "is_certified"), [(3, False), (4, True)])
def test_of_a_run_by_two_thirds_more_than_two_thirds(signers: int, is_certified: bool) -> None:
    log, by_majority = log_of(5, Quorum.TWO_THIRDS), log_of(5)
    header = next_of(log)
    found = certify(log, header, choice_of(header), (), voted(header, range(signers)), {})
    assert (found is not None) is is_certified
    few = made(by_majority, header, range(3))
    assert prove(few, by_majority, header, verify) == Support(True, 3)
    with pytest.raises(CertificateError, match="3 signers of 5 voters are too few"):
        prove(few, log, header, verify)


def test_a_farewell_counts_from_its_entry_on() -> None:
    """A peer that left after entry 1 may have voted for it."""
    log = log_of(2)
    header = next_of(log)
    assert certify(log, header, choice_of(header), (), voted(header, [0]), gone([1], 2)) is None
    late = Farewell(place=1, index=2, signature=gone([1], 2)[PEERS[1]][1])
    with pytest.raises(CertificateError, match="or of a later index"):
        prove(made(log, header, [0], [1]).model_copy(update={"farewells": (late,)}), log, header, verify)


def test_the_first_entry_is_signed_by_most_of_its_own_members() -> None:
    header = log_of(3).last
    assert header is not None
    assert prove(made(LOG, header, [1, 2]), LOG, header, verify) == Support(True, 2)
    assert certify(LOG, header, choice_of(header), (), voted(header, [0]), {}) is None


def test_a_name_has_one_vote_whichever_of_two_machines_with_its_key_signs() -> None:
    """Only the incarnation that the roster names counts, and it once: the copy's signature is of something else."""
    log = log_of(3)
    header = next_of(log)
    ours, theirs = made(log, header, [0, 1]).signers
    copys = Signer(place=0, signature=voted(header, [0], started=99)[PEERS[0], 99])
    for signers in ((copys, theirs), (ours, theirs.model_copy(update={"signature": copys.signature}))):
        with pytest.raises(CertificateError, match="is not its own"):
            prove(made(log, header, [0, 1]).model_copy(update={"signers": signers}), log, header, verify)
    for signers in ((ours, copys), (ours, ours)):
        with pytest.raises(CertificateError, match="names a voter twice, or an unknown one"):
            prove(made(log, header, [0, 1]).model_copy(update={"signers": signers}), log, header, verify)


def test_a_certificate_is_shortened_to_what_is_enough() -> None:
    log = log_of(5)
    header = next_of(log)
    whole = made(log, header, range(4), [4])
    assert ([one.place for one in whole.signers], whole.farewells) == ([0, 1, 2, 3], ()), "no farewell is needed"
    short = shortened(whole, log, header)
    assert [one.place for one in short.signers] == [0, 1, 2]
    assert prove(short, log, header, verify) == Support(True, 3)
    few = made(log, header, [0, 1], [3, 4])
    assert shortened(few, log, header) == few


def test_a_minoritys_certificate_keeps_all_signatures() -> None:
    log = log_of(5)
    header, group = next_of(log), tuple((PEERS[place], 7 + place) for place in range(2))
    alone = made(log, header, range(2), group=group)
    assert shortened(alone, log, header) == alone
    assert prove(alone, log, header, verify) == Support(False, 2)


def lies(log: LogState, header: Header) -> dict[str, Certificate]:
    other, good, choice = next_of(log, digest_of(b"another")), made(log, header, [0, 1]), choice_of(header)
    first, second = good.signers
    group = ((PEERS[0], 7), (PEERS[1], 8))

    def by(places: Iterable[int], **update: object) -> Certificate:
        """Return a certificate of the entry with signatures of something else."""
        signed = voted(header, places, choice.model_copy(update=update))
        return good.model_copy(update={"signers": tuple(map(signer, enumerate(signed.values())))})

    def signer(placed: tuple[int, bytes]) -> Signer:
        return Signer(place=placed[0], signature=placed[1])

    return {
        "of another entry": made(log, other, [0, 1]),
        "with signatures of another entry": by([0, 1], header=other.digest),
        "with signatures of another ballot": by([0, 1], ballot=choice_of(header, 9).ballot),
        "with signatures of phase 1": by([0, 1], phase=Phase.PREPARE),
        "with signatures of a minority": by([0, 1], group=bytes(32)),
        "of a group that it does not name": good.model_copy(update={"group": group}),
        "of phase 1": good.model_copy(update={"choice": choice_of(header, phase=Phase.PREPARE)}),
        "of another incarnation": good.model_copy(
            update={"signers": tuple(map(signer, enumerate(voted(header, [0, 1], started=8).values())))}
        ),
        "of somebody else": good.model_copy(
            update={"signers": (first, first.model_copy(update={"place": 1}))},
        ),
        "one signature twice": good.model_copy(update={"signers": (first, first)}),
        "of nobody": good.model_copy(update={"signers": (first, second.model_copy(update={"place": 3}))}),
        "of too few": good.model_copy(update={"signers": (first,)}),
        "a farewell in another incarnation": good.model_copy(
            update={"signers": (first,), "farewells": farewells([1, 2], started=8)}
        ),
        "a farewell that is a vote": good.model_copy(
            update={
                "signers": (first,),
                "farewells": (*farewells([2]), Farewell(place=1, index=1, signature=second.signature)),
            }
        ),
        "signed and gone": good.model_copy(update={"farewells": farewells([0])}),
    }


def farewells(places: Iterable[int], started: int = 7) -> tuple[Farewell, ...]:
    found = [(place, gone([place], 1, started)[PEERS[place]]) for place in places]
    return tuple(Farewell(place=place, index=index, signature=signature) for place, (index, signature) in found)


@pytest.mark.parametrize("lie", lies(log_of(3), next_of(log_of(3))))
def test_a_false_certificate_proves_nothing(lie: str) -> None:
    log = log_of(3)
    header = next_of(log)
    with pytest.raises(CertificateError):
        prove(lies(log, header)[lie], log, header, verify)


def test_the_right_phase_is_asked_for() -> None:
    log = log_of(3)
    header = next_of(log)
    choice = choice_of(header, phase=Phase.PREPARE)
    lock = certify(log, header, choice, (), voted(header, [0, 1], choice), {})
    assert lock is not None
    assert prove(lock, log, header, verify, Phase.PREPARE) == Support(True, 2)
    with pytest.raises(CertificateError, match="of phase 1, not 2"):
        prove(lock, log, header, verify)


def test_what_a_minority_made_is_not_certified_because_somebody_left_meanwhile() -> None:
    """Regression: a farewell that came while it went on alone made two of four two of three; others certified another
    entry."""
    log = log_of(4)
    header, group = next_of(log), tuple((PEERS[place], 7 + place) for place in range(3))
    assert prove(made(log, header, [0, 1, 2], [3], group), log, header, verify) == Support(False, 3)


def test_nobody_has_left_before_the_first_entry() -> None:
    header = log_of(2).last
    assert header is not None
    assert certify(LOG, header, choice_of(header), (), voted(header, [0]), gone([1], 0)) is None
    farewell = Farewell(place=1, index=0, signature=gone([1], 0)[PEERS[1]][1])
    [signer, _] = made(LOG, header, [0, 1]).signers
    forged = made(LOG, header, [0, 1]).model_copy(update={"signers": (signer,), "farewells": (farewell,)})
    with pytest.raises(CertificateError, match="before the first entry"):
        prove(forged, LOG, header, verify)


def subsets(places: Collection[int]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(places, size) for size in range(len(places) + 1)))


@pytest.mark.parametrize("quorum", Quorum)
@pytest.mark.parametrize("members", range(1, 6))
def test_two_certificates_of_one_place_share_a_signer(members: int, quorum: Quorum) -> None:
    """A voter that has left at the place has voted nowhere there, and so is in neither."""
    log = log_of(members, quorum)
    header = next_of(log)
    everybody = range(members)
    blank = bytes(64)

    def is_certified(signers: Collection[int], leavers: Collection[int]) -> bool:
        certificate = Certificate(
            choice=choice_of(header),
            group=(),
            signers=tuple(Signer(place=place, signature=blank) for place in signers),
            farewells=tuple(Farewell(place=place, index=1, signature=blank) for place in leavers),
        )
        try:
            return prove(certificate, log, header, lambda peer, text, signature: True).is_certified
        except CertificateError:
            return False

    certified = [
        (set(signers), set(leavers))
        for signers, leavers in product(subsets(everybody), subsets(everybody))
        if not set(signers) & set(leavers) and is_certified(signers, leavers)
    ]
    assert certified
    for (first, gone_first), (second, gone_second) in combinations(certified, 2):
        if not first & gone_second and not second & gone_first:
            assert first & second
