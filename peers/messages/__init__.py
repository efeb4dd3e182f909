"""The messages of the protocol, and how they are packed."""
