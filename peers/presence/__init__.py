"""Who is there, who reaches whom, who can be relied on, and who leads. Takes what heartbeats and links say.

Other rooms import:
admission: RunAdmission, refused
allowances: Allowance, Allowances
election: LATENESS, culprits, highest_attempt, quorum
gossip: Gossip
heartbeat: ADDRESS_LENGTH, Endpoint, Heartbeat, HeldOutLoss, NAMED_PEERS, PeerState, SIZE_LIMIT, TAIL, name_peers
life_signs: LifeSign
meeting_place: MeetingPlace
membership: DONATING, Membership, PARTICIPATING
news: Request
presence: Presence, state_told
reachability: SEEN_LIMIT
standing: Pairs, Standing
voice: Pace, Voice
"""
