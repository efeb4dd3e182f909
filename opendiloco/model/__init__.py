"""The model of a run: built, laid out in flat vectors, evaluated, exported.

Build, evaluation, loss and parameters import torch; export, initial_weights, layout and utilisation need none.
"""
