"""Chat templates: Jinja from a model's files, with bounds on time, lengths and what it may reach.

``template.BoundedTemplate`` compiles and renders, ``sandbox`` has the bounds, ``names`` what templates may name beyond
Jinja. Nothing of ``fwk`` is imported here: what a template is given, and what a refusal is to a client, is
``core/fwk/text/chat_template.py``.
"""
