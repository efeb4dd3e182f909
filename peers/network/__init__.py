"""Network access: hivemind and libp2p, by which peers find a run; links between peers; port mapping by home routers.

Other rooms import:
bootstrap: NodeTask, announce_manifest, keep_announced, listed_runs, run_bootstrap
channel: BYTES_UNDER_WAY, Channel, ChunkSender, Frame, LONGEST_HELD, PeerRefusedError, PeerUnreachableError,
    Places, RefusalError, Serve, receive_chunks
contacts: host_of, is_loopback, is_numeric, is_public
daemon: own_addresses, parse_addresses, peer_id_of, require_free_port, sweep_sockets
data_port: LINK_INFO, LinkInfo, PROBED_PORTS, ProbeAnswer, probe
first_contact: CONTACT_LIMIT, FILE_NAME, RememberedPeers, endpoint, which_answer
known_runs: send_amendment
links: EAGER, LinkSettings
neighbours: announced, neighbours
own_network: SOMEWHERE, address_towards, everywhere, is_behind_nat, network_of
rating: RATING, Rater, ask_rating
run_failures: RunFailures
signals: LEAVE_SIGNALS, signals_held_back
sockets: endpoint_of, has_bbr, listen, parse_endpoint
throttle: Caps, FEWEST, FEWEST_WITH_BBR, Lanes, MOST, MOST_WITH_BBR, RateMeter
transport: HivemindTransport
"""
