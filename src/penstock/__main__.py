"""`python -m penstock` is the command `penstock`."""

import sys

from penstock.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
