"""What each exit status of `diloco-peer` means: the one table of them, which `diloco-peer --help` shows."""

from __future__ import annotations

EXIT_CODES: dict[int, str] = {
    0: "all went well, or a polite leave",
    1: "an unexpected error: a bug; or a demo whose peers disagree, whose model did not learn, or that was too short",
    2: "wrong usage: an option, argument, environment variable or configuration file",
    3: "a manifest, invite, run id, run.toml or links.toml that is wrong or was tampered with",
    4: "the swarm is out of reach: no bootstrap node answers, the run is unknown, or nobody is there",
    5: "this machine's side of the network: a port in use, an identity file, libp2p's daemon",
    6: "this machine does not fit: memory, disk, torch, or a device that is not there",
    7: "the corpus is missing, unreadable, too small, or a local folder not named with --data, --model or --tokenizer",
    8: "training failed: a worker died too often, or a loss or weight is not finite",
    9: "a checkpoint is missing, damaged, or of another run",
    10: "a remote folder cannot be used: its URL, the package for it, or its credentials",
    11: "a log whose headers, payloads or states are not what its digests say",
    12: "a peer of a run that is followed has another state than the log leads to, or this machine has",
    13: "a run by invitation does not admit this machine: no ticket, or one that is expired or revoked",
    14: "another machine takes part with the same key: a copied identity file",
    16: "`doctor` has found what keeps this machine from training, or from taking part in the run",
    70: "the protocol was broken: a bug, ours or a peer's",
    130: "left at once: after a second Ctrl-C, or the first where there is nothing to finish",
}
UNEXPECTED, UNFIT, INTERRUPTED = 1, 16, 130


def exit_code_lines() -> str:
    """The table as lines of text."""
    return "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
