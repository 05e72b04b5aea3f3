"""Pid 1 of a sandbox container: `python -m sandbox`, or this file run as a program, which starts sooner."""

import sys

from sandbox.boot.packed import PackedImports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """Imports everything the children need, then supervises them."""
    with PackedImports():
        supervise = imported()
    return supervise(sys.argv[1:])


def imported() -> "Callable[[list[str]], int]":
    """Imports everything; returns the function that runs pid 1."""
    from sandbox.boot.diet import deferred_imports

    with deferred_imports():
        from sandbox.boot.arguments import box_of
        from sandbox.pid1.supervisor import Supervisor
        from sandbox.runner import agent, runner
    agent.prepare()
    return lambda arguments: Supervisor(box_of(arguments), runner.main).run()


if __name__ == "__main__":
    sys.exit(main())
