"""What home routers are asked for: a port that others can dial, with UPnP, PCP or NAT-PMP."""
