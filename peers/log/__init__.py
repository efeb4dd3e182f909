"""The run's log: headers, the state of the log that follows from them, and the log's files on the disk.

Other rooms import:
certificate: Ballot, Certificate, CertificateError, Choice, Departure, Group, Phase, Support, certify, digest_of_group,
    electorate, position_of, prove, shortened, weigh
chain: Chain, Entry, Outcome, STRETCH_LIMIT, Stretch, Turnout, follow, header_of, outcome_of
folder: ENTRIES, LogFolder, LogFolderError, PAYLOADS, RunLog, payload_path, proof_path, read_chain, read_payload
head_signer: CannotSignError, HeadSigner, SignedFileError
header: FAULT_AGE, FAULT_LIMIT, Fault, Faults, Header, Kind, MEMBER_LIMIT, Member, NO_PAYLOAD, Position,
    UNKNOWN_STATE, cycle_head, may_be_named
lineage: Branch, Lineage, RECENT_ENTRIES, Walk
settings: RunSettings, Timing
state: LogError, LogState, Quorum, TERM, committee, take_order
votes: RECORD_LIMIT, VotesFile, VotesFileError
"""
