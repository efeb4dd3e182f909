"""What everything else is made of: plain values, how they become bytes, and what is promised to whom.

Nothing here waits, and nothing knows of another peer.
"""
