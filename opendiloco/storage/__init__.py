"""Storage of a run's data on this machine's disk or in a remote folder, archives of runs, and audits of stored logs.

Needs no torch, except to audit a log from its first entry on.

Other rooms import:
archive: Archive, ArchivedRun
audit: audit
checkpointer: Checkpointer
files: MANIFEST
loading: Checkpoint, Checkpoints, check_moments_file, load_checkpoint, newest_moments, resume
remote: Remote, check_url, push_folder, without_secrets
run_folder: COMPILED, HeldOutCurve, Journal, RunFolder, default_state_folder, kept_folder, kept_losses, read_curve,
    read_manifest, remembered_addresses
writer: KeepingPlan
"""
