"""What a tokenizer alone explains: where it is read from, how far it is trusted, what its tokens stand for.

``files`` finds one or has it converted, ``bounds`` reads a tokenizer.json and counts what it may make of a text,
``check`` tries patterns in a process with limits (``trial``), ``growth`` looks at texts that a normaliser might make
long. ``vocabulary`` has the bytes of each token, ``streams`` the text of tokens as they come, ``lengths`` how few
tokens a text may have, ``special`` what becomes of special tokens that clients write, ``infill`` the prompts for text
in the middle that its special tokens tell of. Nothing of ``fwk`` is imported here: how prompts are made for a served
model is ``core/fwk/text``.
"""
