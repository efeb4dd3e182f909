"""The doctor: checks if this machine can train, how other peers reach it, and if it meets a run's needs."""
