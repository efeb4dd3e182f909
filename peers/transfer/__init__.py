"""What peers give one another: payloads, headers, snapshots; and where it lies meanwhile."""
