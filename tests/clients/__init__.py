"""Real client libraries, each in an environment of its own, against a running server."""
