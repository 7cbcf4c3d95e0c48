"""The engine: scheduler, KV block manager and step loop. One per engine process.

Here belongs what decides which sequences run in a step and who owns which KV block, and the engine process. What
programs call without a server is ``fwk_offline``. The scheduler sees token ids and block ids: tensors belong to
``fwk.worker``, text to ``fwk.text``, HTTP to ``fwk.server``, and the order of requests to schedule policies, which are
plugins.
"""
