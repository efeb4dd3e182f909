"""What people are told of who reaches whom."""

from __future__ import annotations

import json

import pytest

from opendiloco.cli.status import _picture, _plain
from opendiloco.config.run_config import RunConfig
from opendiloco.run import Run
from opendiloco.view.run_view import RunView, reach_lines, reachability
from peers.presence.heartbeat import NAMED_PEERS, Heartbeat, PeerState
from peers.values.identity import Identity
from peers.values.signed_heads import NOTHING_SIGNED

PEER = Identity.generate().peer_id
PUBLIC, HOME, LOCAL, IPV6 = "11.0.0.5:4000", "192.168.1.4:4000", "127.0.0.1:4000", "[2a0e::5]:4000"
NODE, NAMED, LOCAL_NODE = "/ip4/11.0.0.1/tcp/1/p2p/X", "/dns4/node.example/tcp/1/p2p/X", "/ip4/127.0.0.1/tcp/1/p2p/X"


def beat(**fields: object) -> Heartbeat:
    known: dict[str, object] = {
        "run": "small-abc",
        "peer": PEER,
        "incarnation": 0,
        "sequence": 1,
        "state": PeerState.TRAINING,
        "index": 2,
        "head": bytes(32),
        "state_digest": bytes(32),
        "lineage_tokens": 0,
        "inner_step": 3,
        "tokens_per_second": 1.0,
        "speed": 0.0,
        "loss": None,
        "addresses": (),
        "roster_size": 2,
    }
    return Heartbeat.model_validate(known | fields)


@pytest.mark.parametrize(
    ("endpoints", "relays", "word"),
    [
        ((), (), "-"),
        ((PUBLIC, HOME), (NODE,), "open"),
        ((IPV6,), (NODE,), "open"),
        ((HOME,), (NODE,), "NAT"),
        ((HOME,), (NAMED,), "NAT"),
        ((), (NODE,), "NAT"),
        ((LOCAL,), (LOCAL_NODE,), "open"),  # all on one machine, or in one home
        ((HOME,), (), "open"),
    ],
)
def test_a_word_for_each_peer(endpoints: tuple[str, ...], relays: tuple[str, ...], word: str) -> None:
    assert reachability(beat(endpoints=endpoints, relays=relays)) == word


def test_peers_that_are_hard_to_reach_are_named() -> None:
    tails = tuple(f"tail000{number}" for number in range(3))
    many = tuple(f"tail{number:04}" for number in range(NAMED_PEERS))
    trouble = "too slow for the smallest share; use a faster machine"
    beats = [beat(relayed=tails, unreached=tails[:2]), beat(), beat(relayed=many, trouble=trouble)]
    name = f"…{PEER[-8:]}"
    assert reach_lines(beats) == [
        f"{name}: relayed to 3; cannot reach 2 (tail0000, tail0001)",
        f"{name}: relayed to {NAMED_PEERS} or more; {trouble}",
    ]


def test_status_shows_it_and_says_it_in_json(small_config: RunConfig) -> None:
    shown = beat(endpoints=(HOME,), relays=(NODE,), unreached=("tail0001",), trouble="others cannot reach you")
    run = Run.sign(small_config, Identity.generate())
    lines = [str(part) for part in _picture(RunView(run, [shown]), NOTHING_SIGNED, {}).renderables]
    assert any("cannot reach 1 (tail0001); others cannot reach you" in line for line in lines)
    said = json.loads(json.dumps(_plain(shown, small_config)))
    assert said["reach"] == "NAT"
    assert said["endpoints"] == [HOME]
    assert said["relays"] == [NODE]
    assert (said["relayed"], said["unreached"], said["trouble"]) == ([], ["tail0001"], "others cannot reach you")
