"""The model of a run: built, laid out in flat vectors, evaluated, exported.

Build, evaluation, packing and shards import torch; export, initial_weights, layout and utilisation need none.
"""
