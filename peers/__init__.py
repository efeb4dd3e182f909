"""The swarm: its peers, leaders, data transfers and log. It knows nothing of tensors or training; the caller's codec
defines what a payload means."""
