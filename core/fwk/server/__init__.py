"""The API process: HTTP in front, engine processes behind.

Here belong the request frontend, and the client and supervision of engines (``engine_client``, ``one_engine``,
``server_plugins``). The APIs themselves are dialects, which are plugins; text belongs to ``fwk.text``, connections to
``fwk_http``. Nothing here imports torch or ``fwk.worker``.
"""
