"""From options to a decision: find and open the checkpoint, then choose device, dtype and plugins together.

Here belongs what is settled before a weight is loaded, for servers, ``fwk.LLM`` and ``fwk plugins why`` alike. Building
the chosen objects belongs to ``fwk.worker``.
"""
