"""What the rule of blame costs: questions asked of an endpoint besides the rollouts' own, and time.

Leases with the real completer at a scripted vLLM. Each rollout has sampled a turn. At its second one the endpoint
answers, refuses the text (HTTP 400), or drops the connection for it, until the rollout ends. So every rollout of
the last two kinds needs a control, which no honest run does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.numbers import p50
from bench.report import Findings, Scale
from orchestrator.completion.base import Completer, Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.said import Asked
from orchestrator.types import CompletionKind, Message
from tests.fakes.inference import Fault, ScriptedServer, always
from tests.fakes.inference.faults import Kind
from tests.fakes.plans import TALK, a_plan
from tests.fakes.tokenizer import tokenizer_folder

TITLE = "controls: what it costs to tell whose failure it was"
AT_ONCE = 16
SAYS = "Thought: I look.\n<code>\nprint(1)\n</code>"
REFUSED = "a text that was chosen"


async def measure(scale: Scale) -> Findings:
    found = Findings()
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    count = scale.pick(4, 200, 1000)
    kinds: Sequence[tuple[str, Kind | None]] = (("answered", None), ("refused", "400"), ("dropped", "reset"))
    for name, kind in kinds:
        faults = () if kind is None else (Fault(kind, anywhere=REFUSED),)
        async with ScriptedServer("vllm", always(SAYS), faults=faults) as server:
            completer = await connect(Endpoint(server.base_url, "scripted"), tokenizer, tokens="exact")
            try:
                # A drop is a fault like any other at first: its attempts take seconds of waiting.
                rollouts = count if kind != "reset" else max(4, count // 10)
                control = EndpointControl(completer, tokenizer)
                before = len(server.log.completions)
                seconds = await _ends(completer, tokenizer, control, rollouts)
                asked = len(server.log.completions) - before
            finally:
                await completer.aclose()
        found.add(f"{name}: second turn, p50", p50(seconds) * 1e3, "ms", note=f"{AT_ONCE} rollouts at a time")
        found.add(f"{name}: requests per rollout", asked / rollouts, "", note="2 are the rollout's own")
        found.add(f"{name}: controls per 100 rollouts", 100 * control.questions / rollouts, "")
    return found


async def _ends(
    completer: Completer, tokenizer: HubTokenizer, control: EndpointControl, rollouts: int
) -> list[float]:
    """Seconds of each rollout's second turn."""
    slots = asyncio.Semaphore(AT_ONCE)
    observed = (Message("assistant", SAYS), Message("user", f"Observation:\n{REFUSED}"))

    async def one(index: int) -> float:
        async with slots:
            lease = Lease(a_plan(index), completer, tokenizer, {}, control=control)
            await lease.complete(Asked(1, CompletionKind.ACTION, TALK), b"1")
            started = time.perf_counter()
            await lease.complete(Asked(2, CompletionKind.ACTION, (*TALK, *observed)), b"2")
            took = time.perf_counter() - started
            await lease.aclose()
            return took

    return await asyncio.gather(*(one(index) for index in range(rollouts)))
