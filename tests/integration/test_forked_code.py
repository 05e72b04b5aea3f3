"""A model's code finds in a forked sandbox what it finds in one that was not forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.launch.oci.machine import why_no_forks
from tests.fakes import oci_images
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.runs import flags, lines, run, write_tasks
from tests.integration.launch.test_forked_preload import image_with, module
from tests.integration.test_oci_run import environ

_WHY_NOT = oci_images.why_not() or why_no_forks("runc")
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]
CODE = """Here.
<code>
import sys
MODULES = sorted(sys.modules)
LATE = [name for name in MODULES if type(sys.modules[name]).__name__ == "_LazyModule"]
import inspect, json, os
import heavy
kept = ["SigBlk", "SigIgn", "SigCgt", "CapEff", "Seccomp", "NoNewPrivs"]
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
of_python = [heavy.ANSWER, sys.path, dict(os.environ), os.getcwd(), sys.argv, MODULES, LATE]
of_python += [len(inspect.stack()), sys.getrecursionlimit()]
of_python.append(["UID" if word.isdigit() else word for word in sys.orig_argv])
final_answer(json.dumps([*of_python, {name: status[name] for name in kept}]))
</code>"""


async def answer(home: Path, start: str, base_url: str, image: str) -> str:
    (place := home / start).mkdir()
    write_tasks(place / "tasks.jsonl", 1)
    how = {"group_size": 1, "launcher": "oci", "start": start, "sandbox_image": image}
    ended = await run(*flags(place, base_url, **how), directory=place, environ=environ())
    assert ended.code == 0, ended.stderr
    (line,) = lines(place / "run" / "rollouts.jsonl")
    assert line["outcome"] == "finished", line["reason"]
    return str(line["answer"])


async def test_modules_paths_variables_arguments_signals_and_depth_are_the_same(home: Path) -> None:
    image = image_with(home, module("heavy/__init__.py", "ANSWER = 'of the image'"))
    async with ScriptedServer("vllm", always(CODE)) as server:
        forked, run_alone = [await answer(home, start, server.base_url, image) for start in ("fork", "run")]
    assert "of the image" in forked
    assert forked == run_alone
