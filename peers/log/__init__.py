"""The run's log: headers, what follows from them, and how a peer keeps them on disk."""
