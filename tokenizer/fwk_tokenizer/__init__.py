"""What a tokenizer.json alone explains: how far it is trusted, and what its tokens stand for.

``bounds`` reads one and counts what it may make of a text, ``check`` tries patterns in a process with limits
(``trial``), ``growth`` looks at texts that a normaliser might make long. ``vocabulary`` has the bytes of each token,
``lengths`` how few tokens a text may have. Nothing of ``fwk`` is imported here: which tokenizer a model has, and how
prompts are made with it, is ``core/fwk/text``.
"""
