"""Driver of one peer's protocol on a real network: it carries out effects and hands in events.

Other rooms import:
driver: CALL, CALL_TIMEOUT, Driver
rounds: RoundCosts
training: Sending
"""
