"""The processes of a machine that train, and how the peer process commands them.

Only a worker imports torch, in worker and assembly; what the peer process imports from here needs none.
"""
