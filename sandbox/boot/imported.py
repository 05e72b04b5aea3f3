"""Everything that pid 1 and its children import: what the image packs is what a sandbox uses."""

from collections.abc import Callable
from functools import partial


def imported(*, rehearsed: bool = False) -> Callable[[list[str]], int]:
    """What takes the arguments, with everything imported. `rehearsed`: the runner's rehearsal is held here, once
    for all forks of this process."""
    from sandbox.boot.diet import deferred_imports

    with deferred_imports():
        from sandbox.boot.arguments import box_of
        from sandbox.pid1.supervisor import Supervisor
        from sandbox.runner import agent, runner
    agent.prepare()
    if rehearsed:
        from sandbox.boot.rehearsal import rehearse_here

        rehearse_here()
    main = partial(runner.main, rehearsed=rehearsed)
    return lambda arguments: Supervisor(box_of(arguments), main).run()
