"""Who is to blame where a service has ended: the same services are started anew and left alone for as long.

Once the policy has sampled a token, its requests may have ended a service, and a policy that could do so at bad
luck must not earn another try by it. So the end is the policy's, unless the service ends without it, too."""

import asyncio

from orchestrator.errors import RolloutError
from orchestrator.launch.base import Launcher
from orchestrator.rules.outcome import ServiceEnd
from orchestrator.services.life import Unready, services
from orchestrator.types import SandboxSpec, Task


class ServiceControl:
    """Of one host: one control at a time, and what it has shown holds for all rollouts of the same services."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._one_at_a_time = asyncio.Lock()
        self._survived_s: dict[object, float] = {}  # by task's services and name: the longest that was seen
        self._ended: dict[object, tuple[float, str]] = {}  # the shortest, and how
        self.questions = 0

    async def excuse(self, end: ServiceEnd, task: Task, spec: SandboxSpec) -> str:
        """Why the policy is not to blame for this end; empty: it is. Memory that was used up is its doing."""
        if end.out_of_memory:
            return ""
        key = (repr(task.services), spec, end.name)
        async with self._one_at_a_time:
            if self._survived_s.get(key, -1.0) >= end.lived_s:
                return ""
            lived_s, how = self._ended.get(key, (float("inf"), ""))
            if lived_s <= end.lived_s:
                return how
            self.questions += 1
            how = await self._left_alone(end, task, spec)
            if how:
                self._ended[key] = end.lived_s, how
            else:
                self._survived_s[key] = end.lived_s
            return how

    async def _left_alone(self, end: ServiceEnd, task: Task, spec: SandboxSpec) -> str:
        """How it ended; empty: it did not."""
        try:
            async with services(task, spec, self._launcher) as fresh:
                try:
                    async with asyncio.timeout(end.lived_s):
                        again = await fresh.ended()
                except TimeoutError:
                    return ""
                return f"left alone, {again.name} ends too: {again.detail}"
        except Unready as error:
            return f"left alone, it does not come up again: {error}"
        except RolloutError as error:
            return f"left alone, it is lost too: {error}"
