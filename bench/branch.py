"""Rollouts from their record: what a sandbox at a turn costs beside its steps' own time, what a tree saves in
tokens, what lost sandboxes cost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path

from bench import reach
from bench.losses import losses
from bench.numbers import p50
from bench.report import Findings, Scale
from orchestrator import Orchestrator
from orchestrator.engine.shared import Shared
from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.launch.oci.program import USUAL
from orchestrator.rules.observer import Observer
from orchestrator.settings.sources import load_config
from orchestrator.types import Member, Prefix, Record, Task
from orchestrator.types.prefix import branching
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.oci_images import stored_image
from tests.fakes.tokenizer import tokenizer_folder

TITLE = "Rollouts from their record"
TURNS, TURN, BRANCHES = 4, 3, 8
TRUNK = "g000000-r00-a0"


async def measure(scale: Scale) -> Findings:
    if (reason := why_not_here(USUAL[0])) is not None:
        raise EnvironmentUnusable(reason)
    await asyncio.to_thread(stored_image)
    found = Findings()
    await to_a_turn(found, scale)
    await tree(found)
    await losses(found, scale)
    return found


async def to_a_turn(found: Findings, scale: Scale) -> None:
    """Sandboxes at turns of the demo's rollouts, played just before."""
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place) / "run"
        played = [sys.executable, "-m", "orchestrator", "demo", "--env.launcher=oci", f"--env.run_dir={run_dir}"]
        played += [f"--env.total_steps={scale.pick(1, 8, 33)}", "--env.max_concurrent_sandboxes=2"]
        await asyncio.to_thread(subprocess.run, played, check=True, capture_output=True)
        reached = await reach.reach(run_dir, launcher="oci", max_concurrent_sandboxes=2)
    took, own = zip(*reached.taken, strict=True)
    found.samples |= {"to a turn, s": list(took), "its steps' own, s": list(own)}
    found.add("share that reaches its turn", len(took) / reached.branches, "", at_least=1.0)
    found.add("share with the recorded ids", reached.identical / reached.branches, "", at_least=1.0)
    found.add("to a turn, median", 1000 * p50(took), "ms", note=f"steps' own: {1000 * p50(own):.0f} ms")
    found.add("over 1.2 x the steps' own time, median", p50(reached.over_ms), "ms", at_most=20)
    found.notes.append("by difference: " + ", ".join(f"{name} {n}" for name, n in reached.classes.items()))


async def tree(found: Findings) -> None:
    """Tokens of a trunk and branches at its turn 3 of 4, over those of as many whole rollouts."""
    async with ScriptedServer("vllm", _script) as server:
        whole = await _sampled(server.base_url, BRANCHES + 1)
        (trunk,) = await _sampled(server.base_url, 1)
        branches = await _sampled(server.base_url, BRANCHES, trunk)
    tokens = sum(record.sampled_tokens for record in (trunk, *branches))
    share = tokens / sum(record.sampled_tokens for record in whole)
    found.add(f"tokens of a trunk and {BRANCHES} branches over whole rollouts'", share, "", at_most=0.6)


def _script(call: Call) -> str:
    code = "final_answer(42)" if call.turn + 1 == TURNS else f"print({call.turn})"
    return f"Thought {call.turn} of {TURNS}.\n<code>\n{code}\n</code>"


async def _sampled(base_url: str, rollouts: int, trunk: Record | None = None) -> list[Record]:
    config = load_config(
        env={
            "group_size": rollouts,
            "tokenizer_name": str(tokenizer_folder()),
            "launcher": "oci",
            "max_concurrent_sandboxes": 2,
            "seed": rollouts,
        },
        openai={"base_url": base_url, "model_name": "scripted"},
        environ={},
    )

    async def begin(shared: Shared, task: Task, number: int) -> Prefix | None:
        return None if trunk is None else branching(TRUNK, trunk, TURN)

    members: list[Member] = []
    async with Orchestrator(config, Observer()) as engine:
        engine.maker.begin = begin
        async with aclosing(engine.groups([Task("q", "What is 6 times 7?", "42")])) as groups:
            async for group in groups:
                members += group.members_G
    return [member.attempt.record for member in members]
