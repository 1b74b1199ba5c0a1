"""`python -m wyfold`: the command line."""

import sys

from wyfold.cli import main

if __name__ == "__main__":
    sys.exit(main())
