"""One peer's protocol, without I/O: its driver passes events in and carries out the effects that it returns. Begin
reading at `peer.py`.

Other rooms import:
the room: effects
effect_table: EffectTable, row
effects: Apply, AssemblePayload, Dropped, FetchLineage, FetchPayload, FetchSnapshot, KeepVotes, Note,
    OpenRound, ReduceChunk, Send, SendChunk, StopTraining, TokensLost, Train, Trouble
events: AmendmentSeen, Applied, AverageRefuted, BadBlocks, Captured, ChunkSent, ChunksUnsent,
    ContributionArrived, Digested, Event, HeadsSeen, HeartbeatsSeen, LeaveRequested, LineageNotSeen,
    LineageSeen, NothingToTrain, PayloadAssembled, PayloadFetched, PayloadNotFetched, RateMeasured, ReachSeen, Received,
    ReducedArrived, SignedHeadsSeen, SnapshotFailed, SnapshotRestored, Tick, TrainingDone, TrainingProgress,
    Undelivered, VotesKept, VotesNotKept
exchange: Exchange
pace: Pace
peer: Peer
planning: deadline, deal, foreseen, format_for, is_fair, seconds_to_send
round: RoundState
states: SHOWN_AS, State
voter: OPEN_LIMIT
voting: RecordError, VotingRecord
weights: aged
"""
