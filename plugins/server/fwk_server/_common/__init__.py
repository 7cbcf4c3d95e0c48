"""Shared by the HTTP dialects: reading bodies, writing JSON and event streams."""
