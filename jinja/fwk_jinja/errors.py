"""What can be wrong with a template."""

from __future__ import annotations


class TemplateRefusal(Exception):
    """Why nothing was rendered, as a sentence continues after "the chat template"."""
