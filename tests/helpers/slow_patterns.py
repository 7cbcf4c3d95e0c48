"""Look for regular expressions that hostile input makes slow: ``python -m tests.helpers.slow_patterns FILE...``.

regexploit reads every string as a pattern, so "g++" to it is a possessive repeat, of which its release of today knows
nothing. Taken for an ordinary one, which can only be slower, it stops nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys


def main() -> int:
    """0 when no pattern of the files named on the command line is slow; prints what was found."""
    parser = importlib.import_module("regexploit.ast.sre").SreOpParser  # of the extra [audit]
    parser.from_POSSESSIVE_REPEAT = parser.from_MAX_REPEAT
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        importlib.import_module("regexploit.bin.regexploit_python_ast").main()
    print(found.getvalue())
    return "Worst-case" in found.getvalue() or "Processed" not in found.getvalue()


if __name__ == "__main__":
    sys.exit(main())
