"""The command line as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PATH": os.environ["PATH"]}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environ, timeout=60)


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from orchestrator.cli import main; main(['process', '--help']); main([]);"
        "heavy = {'pydantic', 'yaml', 'grpc', 'docker', 'openai', 'transformers', 'atroposlib', 'asyncio'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    ended = python("-c", script)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_configuration_does_not_import_atropos() -> None:
    ended = python("-c", "import orchestrator.settings.config, sys; sys.exit('atroposlib' in sys.modules)")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_help_into_a_closed_pipe_is_quiet() -> None:
    script = "import sys; from orchestrator.cli import main; sys.exit(main())"
    command = f'{sys.executable} -c "{script}" process --help | true'
    environ = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environ, timeout=60, check=False
    )
    assert ended.stderr == ""


def test_python_m_orchestrator_is_the_command_line() -> None:
    ended = subprocess.run([sys.executable, "-m", "orchestrator", "--version"], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("rollout-orchestrator ")
    assert subprocess.run([sys.executable, "-m", "orchestrator", "nope"], capture_output=True).returncode == 2
