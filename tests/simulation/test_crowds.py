"""The cost of a round in a crowd, counted and held against bars."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peers.log import certificate
from peers.log.certificate import Certificate
from peers.messages.messages import Begin
from peers.protocol.effects import Send
from peers.values.wire import pack
from tests.simulator import crowds
from tests.simulator.crowds import LARGEST, SCENES, Bar, bars
from tests.simulator.simulated_keys import SimulatedKeys
from tests.simulator.tape import play, replayed

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
    assert calm["by the leader"] >= 2 * PEERS - 2, "Begin and Propose to all others"
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
"""Both more than tell each other all votes (`OPEN_LIMIT`); and as many reduce in both, where there are few chunks."""


@dataclass
class Cost:
    """What a scene takes: bytes, messages, and signatures checked by a member that neither leads nor dies."""

    by_leaders: float
    by_all: float
    messages: float
    certificate: int
    checked: int


def costs_at(peers: int, monkeypatch: pytest.MonkeyPatch) -> list[Cost]:
    """Return those of all scenes."""
    checked, certificates, verify = Counter[str](), list[int](), SimulatedKeys.verify

    def counting(keys: SimulatedKeys, peer: str, data: bytes, signature: bytes) -> bool:
        checked[keys._name] += 1
        return verify(keys, peer, data, signature)

    def certify(*given: Any) -> Certificate | None:
        made = certificates_made(*given)
        if made is not None:
            certificates.append(len(pack(made)))
        return made

    certificates_made = certificate.certify
    monkeypatch.setattr(crowds, "BLOCKS", 4)
    costs, crowd = list[Cost](), crowds.gather(peers)
    member = list(crowd.peers)[-1]
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedKeys, "verify", counting)
        patch.setattr("peers.protocol.voting.certify", certify)
        for act in SCENES:
            before, known = checked[member], len(certificates)
            said = {name: float(str(value)) for name, value in act(crowd).costs.items() if name != "what"}
            sizes = certificates[known:]
            bytes_said = said["MB by the leader"] * 1e6, said["MB"] * 1e6
            costs.append(Cost(*bytes_said, said["messages"], max(sizes), checked[member] - before))
    return costs


def test_a_round_grows_with_the_number_of_peers_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a takeover; but for certificates, which every peer needs: they are signed by more than half."""
    growth = 1.5 * LARGE / SMALL  # with the square it would be twice as much as that
    small, large = costs_at(SMALL, monkeypatch), costs_at(LARGE, monkeypatch)
    for one, other in zip(small, large, strict=True):
        assert other.certificate < growth * one.certificate
        assert other.checked < growth * one.checked
    # One takeover may be a try longer than another: what is said counts in all of them together.
    assert sum(cost.by_leaders for cost in large) < growth * sum(cost.by_leaders for cost in small)
    assert sum(cost.messages for cost in large) < growth * sum(cost.messages for cost in small)
    proofs = [2 * size * sum(cost.certificate for cost in costs) for size, costs in ((SMALL, small), (LARGE, large))]
    by_all = [sum(cost.by_all for cost in costs) for costs in (small, large)]  # certificates are of both phases
    assert by_all[1] - proofs[1] < growth * (by_all[0] - proofs[0])
