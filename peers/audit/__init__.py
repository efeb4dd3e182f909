"""Blame: what peers have signed that no honest peer signs, and the proofs of it. Begin reading at `evidence.py`.

Other rooms import:
evidence: Evidence, FalseProofError
proofs: BadContribution, Verifier, read_proof
spot_check: Sample, choose, is_refuted
"""
