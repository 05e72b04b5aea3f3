"""`python -m sandbox`: pid 1 of a sandbox container."""

from __future__ import annotations

import sys
from collections.abc import Callable

from sandbox.diet import deferred_imports
from sandbox.packed import packed_imports


def main() -> int:
    """Imports everything the children need, and supervises them."""
    with packed_imports():
        supervise = imported()
    return supervise(sys.argv[1:])


def imported() -> Callable[[list[str]], int]:
    """What takes the arguments, with everything imported."""
    with deferred_imports():
        from sandbox import agent, runner
        from sandbox.arguments import box_of
        from sandbox.supervisor import Supervisor
    agent.prepare()
    return lambda arguments: Supervisor(box_of(arguments), runner.main).run()


if __name__ == "__main__":
    sys.exit(main())
