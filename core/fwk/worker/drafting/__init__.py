"""Drafts: when a decoder is asked, where they are kept, and which are accepted.

How they are made is a plugin.
"""
