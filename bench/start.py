"""From nothing to a sandbox that waits, and from its claim to the first completion.

Each round starts, one after the other and in changing order, one of ours, a bare container with the same
hardening and one without any; then 4 x cores of ours at once. Claims are of parked sandboxes from the warm pool:
with nothing else going on, and while the pool makes others in their place, as it does in the midst of a run.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, nullcontext

from bench.boxes import (
    BareContainers,
    SignallingCompleter,
    bare_containers,
    sandbox_spec,
    surroundings,
    until_parked,
)
from bench.machine import cores
from bench.numbers import p50, p99, ratio_of_pairs
from bench.report import Findings, Scale
from orchestrator.host.resources import Resources
from orchestrator.proxy.lease import Lease
from tests.fakes.plans import a_plan

TITLE = "create to parked, claim to first completion"
FIRST_COMPLETION_S = 120.0


async def measure(scale: Scale) -> Findings:
    found = Findings()
    rounds, at_once = scale.pick(1, 10, 30), scale.pick(2, 4 * cores(), 4 * cores())
    completer = SignallingCompleter()
    with bare_containers() as bare:
        async with surroundings(completer, at_once) as around:
            await _create(around)
            await _created_alone(found, around, bare, rounds)
            for _ in range(scale.pick(1, 2, 5)):
                await _created_at_once(found, around, at_once)
    for warm, rounds in ((1, scale.pick(1, 10, 30)), (at_once, scale.pick(1, 3, 10))):
        async with surroundings(completer, warm, warm=warm) as around:
            for replaced in (False, True):
                await _claims(found, around, completer, warm, rounds, replaced=replaced)
    _say(found, f"{at_once} at once")
    return found


def _say(found: Findings, many: str) -> None:
    samples = found.samples

    def times(what: str, name: str, at_most: float | None = None) -> None:
        found.add(f"{what}, p50", p50(samples[name]) * 1e3, "ms", at_most=at_most)
        found.add(f"{what}, p99", p99(samples[name]) * 1e3, "ms")

    times("create to parked, alone", "parked_s")
    found.add("a bare container, same hardening, p50", p50(samples["bare_hardened_s"]) * 1e3, "ms")
    found.add("a bare container, no hardening, p50", p50(samples["bare_plain_s"]) * 1e3, "ms")
    ratio = ratio_of_pairs(samples["parked_s"], samples["bare_hardened_s"])
    found.add("create to parked / bare container", ratio, "x", at_most=1.7, note="median of pairs")
    times(f"create to parked, {many}", "parked_at_once_s")
    times("claim to first completion, alone", "first_s, 1 at once", 10.0)
    times(f"claim to first completion, {many}", f"first_s, {many}", 60.0)
    times("the same while it is replaced, alone", "first_s, 1 at once, replaced")
    times(f"the same while they are replaced, {many}", f"first_s, {many}, replaced")
    found.add("removal, alone, p50", p50(samples["removed_s"]) * 1e3, "ms")


async def _created_alone(found: Findings, around: Resources, bare: BareContainers, rounds: int) -> None:
    names = ("parked_s", "removed_s", "bare_hardened_s", "bare_plain_s")
    parked, removed, hardened, plain = (found.samples.setdefault(name, []) for name in names)

    async def ours() -> None:
        parked_s, removed_s = await _create(around)
        parked.append(parked_s)
        removed.append(removed_s)

    async def with_hardening() -> None:
        hardened.append((await asyncio.to_thread(bare.run, hardened=True)).ended_s)

    async def without() -> None:
        plain.append((await asyncio.to_thread(bare.run, hardened=False)).ended_s)

    kinds = [ours, with_hardening, without]
    for number in range(rounds):
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            await kind()


async def _create(around: Resources) -> tuple[float, float]:
    """(seconds until a new sandbox is parked, seconds until it is gone)."""
    started = time.perf_counter()
    async with around.sandbox(sandbox_spec()):
        parked = time.perf_counter()
    await _all_gone(around)
    return parked - started, time.perf_counter() - parked


async def _created_at_once(found: Findings, around: Resources, at_once: int) -> None:
    parked_s = found.samples.setdefault("parked_at_once_s", [])
    started = time.perf_counter()
    async with AsyncExitStack() as stack:

        async def park() -> None:
            await stack.enter_async_context(around.sandbox(sandbox_spec()))
            parked_s.append(time.perf_counter() - started)

        await asyncio.gather(*(park() for _ in range(at_once)))
    await _all_gone(around)


async def _claims(
    found: Findings,
    around: Resources,
    completer: SignallingCompleter,
    at_once: int,
    rounds: int,
    *,
    replaced: bool,
) -> None:
    """All that are warm are claimed at once; `replaced`: the pool begins to make others meanwhile."""
    assert around.pool is not None
    name = f"first_s, {at_once} at once" + (", replaced" if replaced else "")
    for number in range(rounds):
        await until_parked(around, at_once)
        with nullcontext() if replaced else around.pool.following(lambda: 0):
            found.samples.setdefault(name, []).extend(
                await asyncio.gather(*(_claim(around, completer, f"{name}-{number}-{n}") for n in range(at_once)))
            )


async def _claim(around: Resources, completer: SignallingCompleter, rollout_id: str) -> float:
    """Seconds from the claim to the agent's first request; comes back when the rollout is over."""
    asked = completer.asked(rollout_id)
    claimed = time.perf_counter()
    async with around.sandbox(sandbox_spec()) as parked, asyncio.timeout(FIRST_COMPLETION_S):
        lease = Lease(a_plan(rollout_id=rollout_id), around.completer, None, {}, parked.sandbox.cpu_s)
        parked.server.assign(lease)
        first = await asked
        await lease.ended()
    return first - claimed


async def _all_gone(around: Resources) -> None:
    """Until the pool has removed what was used."""
    assert around.pool is not None
    async with asyncio.timeout(FIRST_COMPLETION_S):
        while around.pool.spare:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.005)
