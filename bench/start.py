"""From nothing to a sandbox that waits, and from its claim to the first completion.

Each round starts, one after the other and in changing order, one of ours, a bare container with the same
hardening and one without any; then 4 x cores of ours at once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from bench.boxes import BareContainers, SignallingCompleter, bare_containers, sandbox_spec, surroundings
from bench.machine import cores
from bench.numbers import p50, p99, ratio_of_pairs
from bench.peer_smolagents import measure_docker_executor
from bench.report import Findings, Scale
from orchestrator.proxy.leases import Lease
from orchestrator.rollout import ParkedSandbox, Surroundings, parked_sandbox
from tests.fakes.plans import a_plan

TITLE = "create to parked, claim to first completion"
FIRST_COMPLETION_S = 120.0


async def measure(scale: Scale) -> Findings:
    found = Findings()
    rounds, at_once = scale.pick(1, 10, 30), scale.pick(2, 4 * cores(), 4 * cores())
    bursts = scale.pick(1, 2, 5)
    completer = SignallingCompleter()
    with bare_containers() as bare:
        async with surroundings(completer, at_once) as around:
            await _ours(around, completer, "warm-up")
            await _alone(found, around, completer, bare, rounds)
            for burst in range(bursts):
                await _burst(found, around, completer, at_once, burst)
    samples = found.samples
    found.add("create to parked, alone, p50", p50(samples["parked_s"]) * 1e3, "ms")
    found.add("create to parked, alone, p99", p99(samples["parked_s"]) * 1e3, "ms")
    found.add("a bare container, same hardening, p50", p50(samples["bare_hardened_s"]) * 1e3, "ms")
    found.add("a bare container, no hardening, p50", p50(samples["bare_plain_s"]) * 1e3, "ms")
    found.add(
        "create to parked / bare container",
        ratio_of_pairs(samples["parked_s"], samples["bare_hardened_s"]),
        "x",
        at_most=1.7,
        note="median of pairs",
    )
    found.add("claim to first completion, alone, p50", p50(samples["first_s"]) * 1e3, "ms", at_most=10.0)
    found.add("claim to first completion, alone, p99", p99(samples["first_s"]) * 1e3, "ms")
    many = f"{at_once} at once"
    found.add(f"create to parked, {many}, p50", p50(samples["burst_parked_s"]) * 1e3, "ms")
    found.add(f"create to parked, {many}, p99", p99(samples["burst_parked_s"]) * 1e3, "ms")
    found.add(f"claim to first completion, {many}, p50", p50(samples["burst_first_s"]) * 1e3, "ms", at_most=60.0)
    found.add(f"claim to first completion, {many}, p99", p99(samples["burst_first_s"]) * 1e3, "ms")
    found.add("removal, alone, p50", p50(samples["removed_s"]) * 1e3, "ms")
    await asyncio.to_thread(measure_docker_executor, found, scale.pick(1, 3, 10))
    return found


async def _alone(
    found: Findings, around: Surroundings, completer: SignallingCompleter, bare: BareContainers, rounds: int
) -> None:
    samples = {name: found.samples.setdefault(name, []) for name in ("parked_s", "first_s", "removed_s")}
    hardened, plain = (found.samples.setdefault(name, []) for name in ("bare_hardened_s", "bare_plain_s"))

    async def ours(number: int) -> None:
        for name, value in (await _ours(around, completer, f"alone-{number}")).items():
            samples[name].append(value)

    async def with_hardening(number: int) -> None:
        hardened.append((await asyncio.to_thread(bare.run, hardened=True)).ended_s)

    async def without(number: int) -> None:
        plain.append((await asyncio.to_thread(bare.run, hardened=False)).ended_s)

    kinds = [ours, with_hardening, without]
    for number in range(rounds):
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            await kind(number)


async def _ours(around: Surroundings, completer: SignallingCompleter, rollout_id: str) -> dict[str, float]:
    """One sandbox from its creation to its removal."""
    started = time.perf_counter()
    async with parked_sandbox(sandbox_spec(), around) as parked:
        parked_at = time.perf_counter()
        first_s = await _first_completion(parked, around, completer, rollout_id)
        ended = time.perf_counter()
    removed_s = time.perf_counter() - ended
    return {"parked_s": parked_at - started, "first_s": first_s, "removed_s": removed_s}


async def _first_completion(
    parked: ParkedSandbox, around: Surroundings, completer: SignallingCompleter, rollout_id: str
) -> float:
    """Seconds from the claim to the agent's first request; waits for the rollout's end."""
    asked = completer.asked(rollout_id)
    lease = Lease(a_plan(rollout_id=rollout_id), around.completer, None, {}, parked.sandbox.cpu_s)
    claimed = time.perf_counter()
    parked.server.assign(lease)
    async with asyncio.timeout(FIRST_COMPLETION_S):
        first = await asked
        await lease.ended()
    return first - claimed


async def _burst(
    found: Findings, around: Surroundings, completer: SignallingCompleter, at_once: int, burst: int
) -> None:
    """All created at once, then, when the last one is parked, all claimed at once."""
    parked_s = found.samples.setdefault("burst_parked_s", [])
    first_s = found.samples.setdefault("burst_first_s", [])
    started = time.perf_counter()
    async with AsyncExitStack() as stack:

        async def park() -> ParkedSandbox:
            parked = await stack.enter_async_context(parked_sandbox(sandbox_spec(), around))
            parked_s.append(time.perf_counter() - started)
            return parked

        boxes = await asyncio.gather(*(park() for _ in range(at_once)))
        first_s += await asyncio.gather(
            *(
                _first_completion(box, around, completer, f"burst-{burst}-{number}")
                for number, box in enumerate(boxes)
            )
        )
