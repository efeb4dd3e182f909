"""Several machines that are one volunteer, started by torchrun.

Nothing here imports what takes long.
"""
