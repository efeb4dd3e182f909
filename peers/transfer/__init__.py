"""Sending and fetching of payloads, headers and snapshots, and the memory that holds payloads and snapshots.

Other rooms import:
averages: Admission, ChunkHeader, ask_for_contributions, average_chunk, serve_contributions
buffers: PayloadBuffers, inspection, offer
download: Download, PullTransport, shuffled
following: CannotFollowError, Donors, FollowTransport, Following, UncertifiedWait, next_in_log,
    no_training_peer_error, step
lineage_fetch: Compared, LineageError, LineageFetch, StretchSource, add_headers_before, serve_headers
payloads: MissingProofs, PayloadError, Payloads, serve_payloads, serve_proofs
snapshots: FrozenSnapshot, Snapshot, Snapshotter, Vouched, ask_size, fetch_snapshot, serve_snapshots
storage: FolderStorage, IN_MEMORY, MemoryFile, Storage, empty
"""
