"""Pid 1 of a sandbox container: `python -m sandbox`, or this file as a program, which is quicker."""

import sys

from sandbox.packed import PackedImports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """Imports everything the children need, and supervises them."""
    with PackedImports():
        supervise = imported()
    return supervise(sys.argv[1:])


def imported() -> "Callable[[list[str]], int]":
    """What takes the arguments, with everything imported."""
    from sandbox.diet import deferred_imports

    with deferred_imports():
        from sandbox import agent, runner
        from sandbox.arguments import box_of
        from sandbox.supervisor import Supervisor
    agent.prepare()
    return lambda arguments: Supervisor(box_of(arguments), runner.main).run()


if __name__ == "__main__":
    sys.exit(main())
