"""Shared by the loaders: reading a Hugging Face style model folder."""

from fwk_loaders._common.folder import FolderCheckpoint, read_json

__all__ = ["FolderCheckpoint", "read_json"]
