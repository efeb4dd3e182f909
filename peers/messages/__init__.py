"""The messages of the protocol, and their packing into bytes.

Other rooms import:
averages: Averaged, MARK_BYTES, MARKED, Origin, Statement, statement, statement_of
chunk_sets: chunk_set, chunks_in
commitment: Author, ChunkProof, commit_to, Commitment, CommittedChunk, Contribution, digest_of_all,
    EVIDENCE_LIMIT, fault_in, leads_to, Norms
messages: Begin, Certified, Elsewhere, Inquire, LeaseGrant, LeaseRequest, Leaving, Message, Part, Proof,
    PROOF_LIMIT, Propose, Ready, Refuse, Unread, Vote, Want
packing: pack_message, Packer, unpack_message
rounds: Round, RoundName, Share
"""
