"""Everything of hivemind and libp2p: how a run is found, and how peers talk where there is no link."""
