"""One peer's protocol, without input or output: events in, effects out. `peer.py` is where to begin reading."""
