"""Runs one peer's protocol on a real network: carries out its effects, and tells it what happened.

Other rooms import:
driver: CALL, CALL_TIMEOUT, Driver
rounds: RoundCosts
training: Sending
"""
