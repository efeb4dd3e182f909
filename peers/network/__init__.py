"""Everything that reaches the network: hivemind and libp2p, by which a run is found; links between peers; routers."""
