"""From logits to tokens.

Here belong logits processors, grammars' masks and the sampler's order; how a token is drawn is a plugin.
"""
