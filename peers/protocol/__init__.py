"""One peer's protocol, without input or output: events in, effects out. `peer.py` is where to begin reading.

Other rooms import:
the room: effects
commitment: Author, ChunkProof, Commitment, Contribution, EVIDENCE_LIMIT, Evidence, fault_in, leads_to
effect_table: EffectTable, row
effects: Apply, AssemblePayload, Dropped, FetchLineage, FetchPayload, FetchSnapshot, KeepVotes, Note, OpenRound,
    ReduceChunk, Send, SendChunk, StopTraining, TokensLost, Train, Trouble
events: AmendmentSeen, Applied, AverageRefuted, BadBlocks, Captured, ChunkSent, ChunksUnsent,
    ContributionArrived, Digested, Event, HeadsSeen, HeartbeatsSeen, LeaveRequested, LineageNotSeen, LineageSeen,
    PayloadAssembled, PayloadFetched, PayloadNotFetched, RateMeasured, ReachSeen, Received, ReducedArrived,
    SignedHeadsSeen, SnapshotFailed, SnapshotRestored, Tick, TrainingDone, TrainingProgress, Undelivered, VotesKept,
    VotesNotKept
exchange: Exchange
messages: Certified, Elsewhere, Inquire, Leaving, PROOF_LIMIT, Proof, Vote
pace: Pace
packing: Packer, pack_message, unpack_message
peer: Peer
parts: Averaged, Origin, Statement
planning: deal
round: RoundState
rounds: Round, RoundName
states: SHOWN_AS, State
voter: OPEN_LIMIT
voting: RecordError, VotingRecord
weights: aged
"""
