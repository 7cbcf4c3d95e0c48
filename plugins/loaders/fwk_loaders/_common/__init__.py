"""Shared by the loaders: reading a Hugging Face style model folder."""

from fwk_loaders._common.folder import ModelFolder, read_json

__all__ = ["ModelFolder", "read_json"]
