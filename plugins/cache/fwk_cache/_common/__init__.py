"""What the prefix caches share: a trie of blocks and the orders in which it evicts them."""
