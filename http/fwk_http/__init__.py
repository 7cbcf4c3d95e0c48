"""Serving an ASGI application by uvicorn with bounds on what a client may ask of a connection.

Here belongs what HTTP alone explains: addresses and TLS, sizes and words of request heads, time to send a request and
to read its reply, replies that end when the client goes away (``replies``, for dialects as well), and closing so that a
reply is still read. It knows neither models nor options of ``fwk``, which ``core/fwk/server`` translates; nothing of
``fwk`` is imported.
"""
