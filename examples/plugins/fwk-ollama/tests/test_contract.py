"""What every dialect must do."""

from fwk_ollama.contract import TestOllama

__all__ = ["TestOllama"]
