"""Whether this machine can train, how others reach it, and what a run would take of it: checked and explained."""
