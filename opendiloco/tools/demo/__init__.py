"""A swarm on one machine, from start to end, as `make demo` shows it. Needs no torch itself: its children do."""
