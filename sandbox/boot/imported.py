"""Everything that pid 1 and its children import: what the image packs is what a sandbox uses."""

from collections.abc import Callable
from functools import partial


def imported(*, for_forks: bool = False) -> Callable[[list[str]], int]:
    """What takes the arguments, with everything imported. `for_forks`: also what other forks of this process
    become; and it holds the runner's rehearsal for all of them (`rehearsal`).
    """
    from sandbox.boot.diet import deferred_imports

    with deferred_imports():
        from sandbox.boot.arguments import box_of
        from sandbox.pid1.supervisor import Supervisor
        from sandbox.runner import agent, runner

        if for_forks:
            import sandbox.pid1.service  # noqa: F401
    agent.prepare()
    main = partial(runner.main, rehearsed=for_forks)
    return lambda arguments: Supervisor(box_of(arguments), main).run()
