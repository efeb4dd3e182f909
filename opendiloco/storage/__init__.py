"""What a machine keeps of a run on its disk or elsewhere, and what can be made of it again.

Needs no torch, except to audit a log from its first entry on.
"""
