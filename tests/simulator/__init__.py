"""Runs many peers' protocol on a simulated clock and network, with faults from a seed, and checks the invariants."""
