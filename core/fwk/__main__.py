"""``python -m fwk``."""

import sys

from fwk.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
