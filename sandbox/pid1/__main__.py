"""Runs a command, as a program: `python -c` would import more."""

from sandbox.pid1.command import main

if __name__ == "__main__":
    main()
