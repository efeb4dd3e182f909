"""The swarm: who is there, who leads, how bytes move, what the log says.

Knows nothing of tensors or training: what a payload means is the business of the codec that its user passes in.
"""
