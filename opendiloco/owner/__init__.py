"""The owner's say over a volunteer: when it pauses, when it leaves, and how much of the machine it may take."""
