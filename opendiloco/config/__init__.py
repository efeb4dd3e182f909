"""`run.toml`: its tables, each value checked, and what a person is told about a mistake. Needs no torch."""
