"""The inner loop: what a worker does between two outer steps.

All modules import torch but learning_rate and moments_file, which the peer process uses, too.
"""
