"""Pid 1 of a sandbox container: `python -m sandbox`, or this file run as a program, which starts sooner."""

import sys

from sandbox.boot.packed import PackedImports


def main() -> int:
    """Imports everything the children need, then supervises them."""
    with PackedImports():
        from sandbox.boot.imported import imported

        supervise = imported()
    return supervise(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
