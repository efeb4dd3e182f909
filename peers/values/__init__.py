"""Plain values that all other packages of `peers` use, and their packing into bytes: identities, leases, manifests,
tickets, chunks.

Nothing here knows of another peer.

Other rooms import:
chunks: ChunkedPayload, Chunking, KEPT_BYTES, KeptPayloads, MOST_LEVELS, NODE, PayloadSize, StateChunking, Sum, SumTree,
    chunk_digests, chunks_of, digest_of_chunks, digest_of_state, parts_of, payloads_moved, root_of, split_by_rate
identity: Identity, Keys, SIGNATURE_BYTES, Signature, Verify, is_peer_id, peer_id_of_bytes, verify
leases: Lease, PIECE_LIMIT, SamplePool, SampleRange, prefix, sample_count
manifest: ADDRESS, AMENDMENTS_LIMIT, AMENDMENT_LIMIT, ASK_AGAIN, Amendment, Invite, LoggedAmendment, RUN_ID,
    SignedManifest, newest
signed_heads: HEADS_BYTES, KEYS_LIMIT, NOTHING_SIGNED, SignedHead, SignedHeads, SignedHeadsError, pack_heads,
    unpack_heads
system: PARTIAL, cancel_and_wait, make_private_folder, next_sequence, now, open_private, shared_folder, start_task,
    sweep_folders, sync_folder, temporary_folder, write_whole
tickets: ANOTHER_TICKET, GRACE, ID_BYTES, LIST_BYTES, REVOKED_LIMIT, Revocations, SHOWN_BYTES, Ticket, TicketError,
    check_ticket
wire: Buffer, Count, DIGEST_BYTES, Digest, MESSAGE_LIMIT, PROTOCOL_VERSION, PeerId, Reach, Reason, RunId, Samples,
    Seconds, NICKNAME, NICKNAME_LENGTH, Value, WireError, check_nickname, decode, digest_of, from_plain, pack,
    pack_plain, printable, unpack, unpack_from
workload: BadBlocksError, Blocked, Blocks, InnerLoop, Inspect, OnCaptured, PayloadKind, Progress, Reduction,
    ReplicatedState, SnapshotError, Trained, Workload, captures_nothing
"""
