"""Serving an ASGI application by uvicorn with bounds on what a client may ask of a connection.

Here belongs what HTTP alone explains: addresses and TLS, sizes and words of request heads, time to send a request and
to read its reply, replies that end when the client goes away (``replies``, for dialects as well), and closing so that a
reply is still read; and what stands before every route: who may use it (``authorization``, ``keys``), how large a body
is (``middleware``), how many requests are let in (``admission``). It knows no models; nothing of ``fwk`` is imported,
and options reach it as ``core/fwk/server`` has them.
"""
