"""Options that several backends have; two plugins may share one that both declare alike."""

from typing import Any

from fwk import option


def whitespace_pattern() -> Any:
    """Of backends that take a pattern."""
    return option(
        r"[ \t\n\r]{0,32}",
        "Regular expression of the whitespace between the parts of constrained JSON. Bounded by default, for a model "
        "may go on with blanks for ever.",
        aliases=["outlines-whitespace-pattern"],
    )


def no_whitespace() -> Any:
    """Of backends that can do without any."""
    return option(False, "Allow no whitespace between the parts of constrained JSON: shorter output.")
