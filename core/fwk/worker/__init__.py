"""The worker: owns one device, turns a ``Batch`` into tokens.

Here belong building and loading the model (``builder``, ``model_builder``), the inputs of a forward pass, the
KV cache's tensors, the model runner, graphs, sampling and verification of drafts. What runs is decided in
``fwk.engine``; attention, weight formats, sampling methods and the models themselves are plugins.
"""
