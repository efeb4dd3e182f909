"""Who is there and who is further on, as one peer hears it itself. Takes what beats, heartbeats and links say.

Other rooms import:
admission: RunAdmission, refused
allowances: Allowance, Allowances, SENDERS_LIMIT, STRANGER
beats: Beats
branches: state_told
calls: BEAT, BEAT_BYTES, Beat, HEARTBEAT, PAGE, Request, SHORT, WHO, tag_of
copies: Copies
heartbeat: ADDRESS_LENGTH, Endpoint, Heartbeat, HeldOutLoss, NAMED_PEERS, PeerState, SIZE_LIMIT, name_peers
meeting_place: MeetingPlace
membership: DONATING, Membership, PARTICIPATING
presence: Presence
reachability: SEEN_LIMIT
"""
