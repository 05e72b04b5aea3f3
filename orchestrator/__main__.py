"""`python -m orchestrator COMMAND`: as the `orchestrator` script."""

import sys

from orchestrator.cli import main

if __name__ == "__main__":
    sys.exit(main())
