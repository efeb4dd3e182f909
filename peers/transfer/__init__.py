"""What peers give one another: payloads, headers, snapshots; and where it lies meanwhile.

Other rooms import:
admission: Admission, ChunkHeader
averages: SpotCheck, asking, average_chunk, serve_contributions
buffers: PayloadBuffers, inspection, offer, payload_kind
download: CHANCE, Download, PullTransport, shuffled
following: CannotFollowError, Donors, Doubts, FollowTransport, Following, next_in_log, nobody_trains, step
lineage_fetch: Compared, LineageError, LineageFetch, Past, add_headers_before, serve_headers
payloads: PayloadError, Payloads, serve_payloads
proofs: MissingProofs, serve_proofs
snapshot_fetch: Vouched, ask_size, fetch_snapshot
snapshots: Freezer, FrozenSnapshot, Snapshot, serve_snapshots
storage: FolderStorage, IN_MEMORY, Storage, empty
"""
