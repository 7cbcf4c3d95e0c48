"""Chat templates: Jinja from a model's files, with bounds on time, lengths and what it may reach.

``chat.ChatTemplate`` makes prompts of messages, ``template.BoundedTemplate`` compiles and renders, ``sandbox`` has the
bounds, ``names`` what templates may name beyond Jinja. Nothing of ``fwk`` is imported here: which template a model has,
and what of a prompt is special, is ``core/fwk/text/model_text.py``.
"""
