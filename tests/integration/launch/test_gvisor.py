"""An agent in gVisor, where the Engine has it: the two identities are apart there too."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.launch.channels import Channels
from orchestrator.launch.contents import PROGRAM
from orchestrator.launch.names import DEFAULT_IMAGE
from tests.fakes.plans import a_sandbox
from tests.fakes.scripted_orchestrator import Script, ScriptedOrchestrator, action
from tests.integration.launch.probes import launcher_for

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.timeout(900)]

STEPS = (
    ("import os, subprocess\nsubprocess.check_output(['echo', str(6 * 7)])", "b'42\\n'"),
    ("import socket\nsocket.socket(socket.AF_UNIX).connect('/run/channel/box/s')", "PermissionError"),
    (
        "[runner] = {int(p) for p in os.listdir('/proc') if p.isdecimal()} - {1, os.getpid()}\nos.kill(runner, 9)",
        "PermissionError",
    ),
    ("os.setuid(0)", "PermissionError"),
    ("socket.create_connection(('192.0.2.1', 80), timeout=5)", "Error"),
    ("open('/opt/sandbox/x', 'w')", "Error"),
    ("while True: pass", "longer than 8 seconds"),
    ("import os\nlen([p for p in os.listdir('/proc') if p.isdecimal()])", "3"),
)


async def test_an_agent_finishes_in_gvisor_and_its_code_reaches_nothing(runsc: str, run: str) -> None:
    spec = a_sandbox(DEFAULT_IMAGE, runtime=runsc, pids=512)
    script = Script(
        [*(action(code) for code, _ in STEPS), action("final_answer('through')")],
        step_timeout_s=8.0,
        max_steps=len(STEPS) + 1,
    )
    async with launcher_for(run, program=PROGRAM) as launcher:
        with Channels(run) as channels, channels.directory() as channel:
            async with (
                ScriptedOrchestrator(channel, script) as served,
                launcher.launch(spec, channel) as sandbox,
                asyncio.timeout(240),
            ):
                ended = await sandbox.exited()
    assert ended.exit_code == 0, ended
    for (code, expected), observed in zip(STEPS, served.observations, strict=True):
        assert expected in observed, f"{code}\n--> {observed}"
    assert served.answer == b"through"
