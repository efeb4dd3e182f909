"""Signs of life: only the owner of a chain can make them, and everybody can check them."""

from __future__ import annotations

import pytest

from peers.presence.heartbeat import Seal
from peers.presence.life_signs import SIGN, SLOTS, Chain, LifeSign, leads_to, pack_signs, salt_of, tag_of, unpack_signs
from peers.values.identity import Identity

IDENTITY, OTHER = Identity.generate(), Identity.generate()
SINCE = 1_700_000_000_000
SALT = salt_of(IDENTITY.peer_id, SINCE)


@pytest.fixture
def chain() -> Chain:
    return Chain(IDENTITY, "tiny", SINCE)


def test_every_link_leads_to_the_seal_and_to_later_ones_lead_earlier_ones(chain: Chain) -> None:
    end = chain.seal(0).link
    assert all(leads_to(chain.link(slots), slots, end, SALT) for slots in (0, 1, 7, SLOTS))
    assert leads_to(chain.link(9), 4, chain.link(5), SALT)


def test_a_link_stands_for_its_slot_alone(chain: Chain) -> None:
    assert not leads_to(chain.link(7), 8, chain.seal(0).link, SALT)
    assert not leads_to(chain.link(7), 6, chain.seal(0).link, SALT)
    assert not leads_to(chain.link(5), -4, chain.link(9), SALT), "nobody goes back"
    assert not leads_to(chain.link(1), SLOTS + 1, chain.seal(0).link, SALT), "nor hashes for ever"


def test_each_chain_is_another(chain: Chain) -> None:
    links = {chain.link(3)}
    links |= {
        Chain(*about).link(3) for about in ((OTHER, "tiny", SINCE), (IDENTITY, "x", SINCE), (IDENTITY, "tiny", 1))
    }
    assert len(links) == 4
    assert not leads_to(chain.link(3), 3, chain.seal(0).link, salt_of(OTHER.peer_id, SINCE))


def test_a_tag_names_the_chain_and_not_the_heartbeat(chain: Chain) -> None:
    assert tag_of(IDENTITY.peer_id, chain.seal(0)) == tag_of(IDENTITY.peer_id, chain.seal(9))
    assert tag_of(OTHER.peer_id, chain.seal(0)) != tag_of(IDENTITY.peer_id, chain.seal(0))
    assert tag_of(IDENTITY.peer_id, Seal(since=SINCE, number=0, link=bytes(12))) != tag_of(
        IDENTITY.peer_id, chain.seal(0)
    )


def test_signs_are_read_back() -> None:
    signs = [LifeSign(bytes([number]) * 8, number, 255 - number, bytes([number]) * 12) for number in range(5)]
    packed = pack_signs(signs)
    assert len(packed) == 5 * SIGN.size == 5 * 22
    assert unpack_signs(packed) == signs
    with pytest.raises(ValueError, match="no whole number"):
        unpack_signs(packed[:-1])
