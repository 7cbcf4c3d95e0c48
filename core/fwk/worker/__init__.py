"""The worker: owns one device, turns a ``Batch`` into tokens.

Here belong building a worker (``builder``) and, each in a folder: loading the model, the runner and the inputs of a
forward pass, sampling, verification of drafts, captured steps, and the KV cache's tensors. What runs is decided in
``fwk.engine``; attention, weight formats, sampling methods and the models themselves are plugins.
"""
