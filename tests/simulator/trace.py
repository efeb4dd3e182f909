"""A message on one line, for people who read what a simulated swarm did."""

from __future__ import annotations

from peers.log.certificate import Certificate, Choice
from peers.messages.chunk_sets import chunks_in
from peers.messages.messages import Begin, Certified, Message, Part, Propose, Ready, Refuse, Vote, Want


def brief(message: Message) -> str:
    """Return its kind, its place in the log, and what matters of the rest."""
    return f"{message.kind} {message.position.index} {_details(message)}".rstrip()


def _details(message: Message) -> str:
    match message:
        case Ready(view=view, tokens=tokens, round=round, lock=lock, refused=refused, reason=reason):
            bound = f", locked on {_short(lock.header.digest)}" if lock else ""
            against = f", not for {refused}: {reason}" if refused else ""
            return f"view {view}, {tokens} tokens, in {round or 'no round'}{bound}{against}"
        case Begin(ballot=ballot, round=round, seconds=seconds, heirs=heirs):
            return f"{ballot} round {round.name} of {', '.join(round.peers)}, {seconds:g} s, heirs {heirs or 'none'}"
        case Part(round=round, averages=averages):
            absent = sorted({peer for average in averages for peer in average.absent})
            return f"round {round}, chunks {[average.chunk for average in averages]}, absent {absent or 'nobody'}"
        case Want(round=round, averages=averages, blocks=blocks):
            return f"round {round}, averages {chunks_in(averages)}, blocks {chunks_in(blocks)}"
        case Propose(ballot=ballot, header=header, justify=justify):
            shown = f", as {_choice(justify.choice)} shows" if justify else ""
            return f"{ballot} {_short(header.digest)} of {', '.join(header.peers)}{shown}"
        case Vote(choice=choice):
            return _choice(choice)
        case Certified(header=header, certificate=certificate):
            return _certificate(certificate) if certificate else f"{_short(header.digest)} without a certificate"
        case Refuse(reason=reason):
            return reason
        case _:
            return ""


def _choice(choice: Choice) -> str:
    alone = " alone" if choice.alone else ""
    return f"{choice.ballot} phase {int(choice.phase)}{alone} {_short(choice.header)}"


def _certificate(certificate: Certificate) -> str:
    places = ", ".join(str(signer.place) for signer in certificate.signers)
    return f"{_choice(certificate.choice)}, signed at places {places}"


def _short(digest: bytes) -> str:
    return digest.hex()[:8]
