"""The KV cache's tensors and recurrent layers' states: how many fit, what tells them apart, and how they move to tiers.

Which blocks are whose is decided in ``fwk.engine``.
"""
