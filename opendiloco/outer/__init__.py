"""The outer step, and the run's state that the log drives: theta, momentum, and what goes with them. Needs no torch."""
