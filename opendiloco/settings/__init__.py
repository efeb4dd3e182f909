"""What a machine's owner can set, each setting defined once: as option, environment variable and key of a file."""
