"""From a checkpoint to a model with weights.

How files are read and weights are held are plugins.
"""
