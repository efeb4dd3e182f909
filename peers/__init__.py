"""The swarm: its peers, leaders, data transfers and log. The swarm's code does not depend on tensors or training:
the caller's codec defines the meaning of a payload."""
