"""Evidence that peers lie: signed statements that no honest peer makes. Begin reading at `evidence.py`.

Other rooms import:
evidence: Evidence, FalseProofError
proofs: BadContribution, Verifier, read_proof
spot_check: Sample, choose, is_refuted
"""
