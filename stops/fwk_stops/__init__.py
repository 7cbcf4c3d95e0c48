"""What ends a text, found as it comes: stop strings, patterns, repetitions.

Each search takes time linear in the text, keeps its state between pieces, and tells how much of what came may still
begin a match. Nothing of ``fwk`` is imported here: what a request may ask for is ``core/fwk/types/sampling.py``, what
is held back and given out ``core/fwk/text/detokenizer.py``.
"""
