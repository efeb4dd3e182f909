"""What a round costs in a crowd is counted, and held against bars."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from peers.protocol.effects import Send
from peers.protocol.messages import Begin, Commit, Message
from peers.simulator import crowds
from peers.simulator.crowds import LARGEST, Bar, bars
from peers.simulator.simulated_keys import SimulatedKeys
from peers.simulator.tape import play, replayed
from peers.values.wire import pack

PEERS = 6


@pytest.mark.parametrize("largest", [PEERS, LARGEST])
def test_rounds_and_takeovers_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], largest: int
) -> None:
    monkeypatch.setattr(crowds, "LARGEST", largest)
    monkeypatch.setattr("sys.argv", ["crowds", str(PEERS), "--json", str(tmp_path / "crowds.json")])
    crowds.main()
    report = json.loads((tmp_path / "crowds.json").read_text())
    calm, amid, at_commit = report["rows"]
    assert [row["peers"] for row in report["rows"]] == [PEERS] * 3
    for row in report["rows"]:
        assert 0 < row["MB by the leader"] < row["MB"] < 0.1
        assert 0 < row["by the leader"] < row["messages"]
        assert row["leader's CPU s"] > 0
        assert row["a member's CPU s"] > 0
    assert calm["by the leader"] >= 2 * PEERS - 2, "Begin and Commit to all others"
    assert at_commit["what"] == "its leader dies at its commit"
    printed = capsys.readouterr().out
    if largest == PEERS:
        assert {bar["name"] for bar in report["bars"]} >= {f"{PEERS} peers, {amid['what']}: MB by the leader"}
        assert "verdict: " in printed
    else:
        assert report["bars"] == []
        assert "verdict" not in printed


def test_a_death_may_cost_three_times_as_much() -> None:
    row = {"peers": 9, "what": "a round", "MB by the leader": 3.5, "MB": 19.0, "leader's CPU s": 0.5}
    assert [(bar.at_most, bar.is_met) for bar in bars(row)] == [(3.0, False), (20.0, True), (1.0, True)]
    death = row | {"what": "its leader dies at its commit"}
    assert [(bar.at_most, bar.is_met) for bar in bars(death)] == [(9.0, True), (60.0, True), (3.0, True)]
    assert str(Bar("bytes", 2.0, 1.0)) == "bytes: 2.00, bar 1: MISSED"


def test_a_tape_leads_a_peer_where_it_was() -> None:
    crowd = crowds.gather(PEERS)
    scene = crowds.calm(crowd)
    tape = crowd.tapes[crowd.leader]
    part = scene.on_tapes[crowd.leader]
    assert 0 < part.start < part.stop == len(tape)
    said = [[(send.to, send.message) for send in effects if isinstance(send, Send)] for effects in replayed(tape)]
    begun = {to for sends in said[part.start :] for to, message in sends if isinstance(message, Begin)}
    assert begun == crowd.peers.keys() - {crowd.leader}
    (seconds,) = play(tape, [part])
    assert seconds > 0


SMALL, LARGE = 20, 60
"""Both more than tell each other all (`OPEN_LIMIT`); and as many reduce in both, where there are few chunks."""


@dataclass
class Cost:
    """What one round takes: bytes, messages, and signatures checked by its leader and by a member that reduces."""

    by_leader: int
    by_all: int
    messages: int
    certificate: int
    checked_by_leader: int
    checked_by_member: int


def cost_of(peers: int, monkeypatch: pytest.MonkeyPatch) -> Cost:
    checked, certificates, verify = Counter[str](), list[int](), SimulatedKeys.verify

    def counting(keys: SimulatedKeys, peer: str, data: bytes, signature: bytes) -> bool:
        checked[keys._name] += 1
        return verify(keys, peer, data, signature)

    def on_message(sender: str, to: str, message: Message) -> Message:
        if isinstance(message, Commit) and message.certificate:
            certificates.append(len(pack(message.certificate)))
        return message

    monkeypatch.setattr(crowds, "BLOCKS", 4)
    crowd = crowds.gather(peers)
    leader, member = crowd.leader, list(crowd.peers)[-1]
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedKeys, "verify", counting)
        crowd.on_message = on_message
        messages = crowd.messages.copy()
        crowds.calm(crowd)
    sent = (crowd.messages - messages).total()
    by_all = sum(crowd.bytes_by.values())
    return Cost(crowd.bytes_by[leader], by_all, sent, max(certificates), checked[leader], checked[member])


def test_a_round_grows_with_the_number_of_peers_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for certificates, which every peer needs: they have the signatures of more than half."""
    small, large = cost_of(SMALL, monkeypatch), cost_of(LARGE, monkeypatch)
    growth = 1.5 * LARGE / SMALL  # with the square it would be twice as much as that
    assert large.by_leader < growth * small.by_leader
    assert large.messages < growth * small.messages
    assert large.certificate < growth * small.certificate
    besides = [one.by_all - peers * one.certificate for one, peers in ((small, SMALL), (large, LARGE))]
    assert besides[1] < growth * besides[0]
    assert large.checked_by_leader < growth * small.checked_by_leader
    assert large.checked_by_member < growth * small.checked_by_member
