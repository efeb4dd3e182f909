"""Driver of one peer's protocol on a real network: it passes events to the protocol, and carries out the effects that
the protocol returns.

Other rooms import:
driver: CALL, CALL_TIMEOUT, Driver
rounds: RoundCosts
training: Sending
"""
