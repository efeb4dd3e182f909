"""How an organiser's amendment comes to peers."""

from __future__ import annotations

import asyncio

import pytest

from peers.errors import RemoteProtocolError
from peers.network.channel import RefusalError
from peers.network.known_runs import KnownRuns, _AmendmentRequest, send_amendment
from peers.values.identity import Identity
from peers.values.manifest import Amendment, SignedManifest
from peers.values.wire import pack
from tests.peers.network.told_network import Network

ORGANISER, STRANGER = Identity.generate(), Identity.generate()
MANIFEST = SignedManifest.create(ORGANISER, "run", {})
RUN = MANIFEST.run_id


def amendment(number: int = 1, learning_rate: float = 0.4, by: Identity = ORGANISER) -> Amendment:
    return Amendment.sign(RUN, number, b"%g" % learning_rate, by)


def node() -> KnownRuns:
    made = KnownRuns()
    made.learn(MANIFEST)
    return made


def test_it_is_given_to_all_that_answer() -> None:
    nodes = {"a": node(), "b": node()}
    assert (
        asyncio.run(
            send_amendment(
                Network("organiser", {name: one.answer_amendment for name, one in nodes.items()}).call,
                RUN,
                amendment(),
                ["a", "b", "gone"],
            )
        )
        == 2
    )
    assert [one.amendment_of(RUN) for one in nodes.values()] == [amendment()] * 2


@pytest.mark.parametrize("later", [amendment(1), amendment(2)])
def test_an_older_one_replaces_nothing(later: Amendment) -> None:
    one = node()
    for given in (amendment(2), later):
        assert (
            asyncio.run(send_amendment(Network("organiser", {"a": one.answer_amendment}).call, RUN, given, ["a"])) == 1
        )
    assert one.amendment_of(RUN) == amendment(2)


def test_another_one_of_the_same_number_is_refused() -> None:
    """Regression: whoever amended twice at once was told that both were taken."""
    one = node()
    asyncio.run(one.answer_amendment("organiser", pack(_AmendmentRequest(run=RUN, amendment=amendment(2)))))
    with pytest.raises(RefusalError, match="was given here already"):
        asyncio.run(one.answer_amendment("organiser", pack(_AmendmentRequest(run=RUN, amendment=amendment(2, 0.5)))))
    assert one.amendment_of(RUN) == amendment(2)


def test_what_nobody_signed_is_refused() -> None:
    one, forged = node(), pack(_AmendmentRequest(run=RUN, amendment=amendment(by=STRANGER)))
    with pytest.raises(RefusalError, match=f"the organiser of {RUN} has not signed"):
        asyncio.run(one.answer_amendment("stranger", forged))
    assert one.amendment_of(RUN) is None


def test_a_run_that_is_not_known_is_refused() -> None:
    one = node()
    request = pack(_AmendmentRequest(run=RUN, amendment=amendment()))
    asyncio.run(one.answer_amendment("organiser", request))
    one.forget(RUN)
    assert one.amendment_of(RUN) is None
    with pytest.raises(RefusalError, match="no run called"):
        asyncio.run(one.answer_amendment("organiser", request))


@pytest.mark.parametrize("payload", [b"", b"x", bytes(2000)], ids=len)
def test_what_is_no_request(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        asyncio.run(node().answer_amendment("b", payload))
