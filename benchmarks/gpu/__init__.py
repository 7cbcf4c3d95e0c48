"""Fifteen minutes on a GPU: whether it is right there, and how fast it is."""
