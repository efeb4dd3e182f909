"""The presence of other peers and their places in the log, as one peer learns them from beats, heartbeats and links.

Other rooms import:
admission: RunAdmission, refused
allowances: Allowance, Allowances, SENDERS_LIMIT, STRANGER
beats: Beats
branches: reported_state
calls: BEAT, BEAT_BYTES, Beat, HEARTBEAT, PAGE, Request, SHORT, WHO, tag_of
copies: Copies
heartbeat: ADDRESS_LENGTH, Endpoint, Heartbeat, HeldOutLoss, NAMED_PEERS, PeerState, SIZE_LIMIT, name_peers
meeting_place: MeetingPlace
membership: DONATING, Membership, PARTICIPATING
presence: Presence
reachability: SEEN_LIMIT
"""
