"""Everything that pid 1 and its children import: what the image packs is what a sandbox uses."""

from collections.abc import Callable


def imported() -> Callable[[list[str]], int]:
    """What takes the arguments, with everything imported."""
    from sandbox.boot.diet import deferred_imports

    with deferred_imports():
        from sandbox.boot.arguments import box_of
        from sandbox.pid1.supervisor import Supervisor
        from sandbox.runner import agent, runner
    agent.prepare()
    return lambda arguments: Supervisor(box_of(arguments), runner.main).run()
