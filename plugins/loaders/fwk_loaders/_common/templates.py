"""Chat templates of which a checkpoint has several, each with a name."""

from __future__ import annotations

WITH_TOOLS = "tool_use"
"""The name of the one that transformers and llama.cpp take where a request has tools."""


def joined(default: str, with_tools: str | None) -> str:
    """One template that renders as ``with_tools`` where there are tools, and else as ``default``."""
    if with_tools in (None, default):
        return default
    # A template's own last line break is not rendered. That behind a tag is not either, but makes a line begin.
    first, second = with_tools.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools %}}\n{first}{{%+ else %}}\n{second}{{%+ endif %}}"
