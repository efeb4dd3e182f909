"""The doctor: checks whether this machine can train, how others reach it, and what a run needs of it."""
