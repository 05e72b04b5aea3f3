"""A rollout of each framework's example: one that imports for itself, one whose sandbox had imported its modules
while it was parked, and one whose image has a file of them besides; in turns."""

from __future__ import annotations

import secrets
from dataclasses import replace

from bench.numbers import p50
from bench.report import Findings, Scale
from orchestrator.agents.equipment import Equipment, ProgramFile
from orchestrator.completion.base import Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.settings.sources import load_config
from orchestrator.types import Record, Task
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.plans import a_plan, an_agent
from tests.fakes.tokenizer import tokenizer_folder
from tests.frameworks.image import WITHOUT_FILE, frameworks_image
from tests.frameworks.programs import ANSWER, PROGRAMS, QUESTION, Program, versions

TITLE = "agent frameworks: alone, preloaded, and out of the image's file"
PLAIN = Program("loop", (), ("```python\nprint(6 * 7)\n```", f"ANSWER: {ANSWER}"))


class Model:
    """Says a program's turns, one after the other."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def __call__(self, call: Call) -> str:
        return "yes" if call.number is None else self.turns.pop(0)


async def measure(scale: Scale) -> Findings:
    image, found = await frameworks_image(), Findings()
    programs = scale.pick(PROGRAMS[:1], PROGRAMS, PROGRAMS)
    ways = [(PLAIN, "alone", image, False)]
    for program in programs:
        ways += [(program, "alone", image, False), (program, "preload", WITHOUT_FILE, True)]
        ways.append((program, "preload and file", image, True))
    model, tokenizer, run_id = Model(), load_tokenizer(str(tokenizer_folder())), secrets.token_hex(8)
    launcher = DockerLauncher(run_id, max_sandboxes=1, allow_localhost_tcp=True, advise=lambda line: None)
    async with ScriptedServer("vllm", model) as server:
        completer = await connect(Endpoint(server.base_url, "scripted"), tokenizer, tokens="exact")
        try:
            with Channels(run_id) as channels:
                around = Resources(launcher, completer, tokenizer, channels.directory)
                for _ in range(scale.pick(1, 3, 5)):
                    for program, way, made_of, preload in ways:
                        model.turns = list(program.turns)
                        record = await _rollout(program, around, made_of, preload=preload)
                        if record.cpu_s is not None:
                            found.samples.setdefault(f"{program.name}: CPU, {way}", []).append(record.cpu_s)
                        found.samples.setdefault(f"{program.name}: time, {way}", []).append(record.duration_s)
        finally:
            await completer.aclose()
            await launcher.aclose()
    for name, seconds in found.samples.items():
        found.add(name, p50(seconds), "CPU-s" if ": CPU" in name else "s")
    found.notes.append(", ".join(f"{name} {version}" for name, version in versions().items()))
    return found


async def _rollout(program: Program, around: Resources, image: str, *, preload: bool) -> Record:
    file = ProgramFile("__main__.py", program.path.read_bytes())
    sandbox = replace(load_config([]).sandbox_spec(), image=image, preload=program.modules if preload else ())
    plan = a_plan(agent=an_agent(kind="program"), sandbox=sandbox, task=Task("task", QUESTION, ANSWER))
    attempt = await run_rollout(plan, replace(around, equipment=Equipment(program=(file,))))
    if attempt.record.answer != ANSWER:
        raise RuntimeError(f"{program.name}: {attempt.outcome}, {attempt.record.steps}")
    return attempt.record
