"""Entry point of ``python -m slapo``."""

import sys

from slapo.command import main

if __name__ == "__main__":
    sys.exit(main())
