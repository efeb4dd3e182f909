"""What a peer counts, for Prometheus. Counting is always on; serving is up to whoever starts the process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, start_http_server

from peers.errors import LocalNetworkError

ENTRIES_APPLIED = Counter("diloco_peer_entries_applied", "Entries of the log applied by this peer")
ROUNDS = Counter("diloco_peer_rounds", "Rounds that this peer took part in")
ROUND_SECONDS = Counter("diloco_peer_round_seconds", "Seconds that this peer has spent in rounds")
ROUND_BYTES = Counter("diloco_peer_round_bytes", "Bytes of chunks moved in rounds", ["direction"])
PAYLOADS_FETCHED = Counter("diloco_peer_payloads_fetched", "Entries that this peer missed and got from others")
STATES_FETCHED = Counter("diloco_peer_states_fetched", "Snapshots taken over from other peers")
TOKENS_LOST = Counter("diloco_peer_tokens_lost", "Tokens that this peer trained and that no entry counts", ["what"])
RELAYED_BYTES = Counter("diloco_peer_relayed_bytes", "Bytes passed on between peers that have no other way")
RELAYED_CONNECTIONS = Gauge("diloco_peer_relayed_connections", "Connections that are passed on now")
DROPPED = Counter("diloco_peer_dropped", "What peers sent and the door refused", ["what"])
OUTER_STEP = Gauge("diloco_peer_outer_step", "Entries in this peer's log")
LIVE_PEERS = Gauge("diloco_peer_live_peers", "Other peers of the run that are alive")
TOKENS_PER_SECOND = Gauge("diloco_peer_tokens_per_second", "This machine's training speed")
LOSS = Gauge("diloco_peer_loss", "Training loss of the last inner step, nats per token; NaN: not training")
HELD_OUT_LOSS = Gauge("diloco_peer_held_out_loss", "Loss of theta on held-out text, when this peer last evaluated it")


def serve_metrics(port: int, host: str = "127.0.0.1") -> None:
    """Answer GET /metrics on this port, from a thread, for as long as the process lives; by default to this machine
    alone. Raises: LocalNetworkError when the port is in use."""
    try:
        start_http_server(port, host)
    except OSError as error:
        raise LocalNetworkError(
            f"metrics cannot be served on port {port}: {error.strerror}.", "Choose another --metrics-port."
        ) from error
