"""Programs whose modules were imported before there was a task: they find what they would find without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents.equipment import Equipment, ProgramFile
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.launch.channels import Channels
from orchestrator.launch.process import ProcessLauncher
from sandbox.errors import StepTimeout, WorkerDied
from sandbox.runner.program_agent import preload
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, a_sandbox, an_agent
from tests.fakes.sandbox_process import ROOT, Places, run
from tests.fakes.scripted_orchestrator import Script

pytestmark = pytest.mark.timeout(600)

RUN = """
import json, sys
from sandbox.worker.program import Program
program, modules, folder = json.loads(sys.argv[1])
print(json.dumps(Program({"PYTHONPATH": folder, "OPENAI_MODEL": "m"}, modules).run(program, "the täsk", {})))
"""
TELLS = """
import json, os, signal, sys
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "stdin": sys.stdin.read(),
    "environment": dict(os.environ), "cwd": os.getcwd(), "name": __name__, "file": __file__,
    "package": __package__, "spec": [__spec__.name, __spec__.origin], "flags": str(sys.flags),
    "main": __import__("__main__").os is os,
    "names": sorted(globals()), "builtins": type(__builtins__).__name__,
    "descriptors": sorted(os.listdir("/proc/self/fd")), "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "kinds": [os.fstat(fd).st_mode for fd in range(3)],
    "signals": str([signal.getsignal(number) for number in sorted(signal.valid_signals())]),
    "modules": sorted(sys.modules),
}
import beside
facts["beside"] = beside.__file__
print(json.dumps(facts))
"""  # noqa: E501


class Shop:
    """A folder of modules, as an image has them, and a program. `python`: who runs it."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self.python = python
        self.modules, self.program, self.workspace = root / "modules", root / "program", root / "workspace"
        for folder in (self.modules, self.program, self.workspace):
            folder.mkdir()

    def run(self, program: str, *preload: str) -> tuple[int, str | None, str, str]:
        """(exit code, answer, printed, printed to standard error) of the program."""
        (self.program / "__main__.py").write_text(program)
        done = subprocess.run(
            [self.python, "-c", RUN, json.dumps([str(self.program), preload, str(self.modules)])],
            env={"PATH": os.defpath, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "PYTHONHASHSEED": "0"},
            cwd=self.workspace,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        *printed, told = done.stdout.splitlines()
        status, answer, _ = json.loads(told)
        return status, answer, "\n".join(printed), done.stderr


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_a_program_finds_the_process_as_if_it_had_been_started_afresh(shop: Shop) -> None:
    (shop.program / "beside.py").write_text("")
    (shop.modules / "heavy.py").write_text("import decimal")
    told = [json.loads(str(shop.run(TELLS, *preload)[1])) for preload in ((), ("heavy", "json"))]
    plain, preloaded = told
    assert {"heavy", "decimal"} <= set(preloaded.pop("modules")) - set(plain.pop("modules"))
    assert preloaded == plain


def test_modules_are_imported_once_and_before_there_is_a_program(shop: Shop) -> None:
    (shop.modules / "heavy.py").write_text("import os, sys\nARGV, STATE = list(sys.argv), []\nprint('imported')")
    program = "import heavy\nprint(heavy.ARGV[2:], heavy.STATE)"
    status, answer, printed, _ = shop.run(program, "heavy")
    assert (status, answer, printed) == (0, "['heavy'] []", "imported\n['heavy'] []")


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(3)",
        "raise SystemExit('it broke')",
        "1 / 0",
        "raise KeyboardInterrupt",
        "import os\nos._exit(4)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "syntax error",
        "import os\nopen(os.environ['ANSWER_FILE'], 'w').write('in a file')\nprint('no')",
        "import atexit\natexit.register(print, 'last')\nprint('first')",
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(0.1) or print('late')).start()",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(input())'])",
        "import sys\nsys.stdout.buffer.write(b'x' * 300000 + b'\\n')",
    ],
)
def test_a_program_ends_as_it_would_end(shop: Shop, program: str) -> None:
    (shop.modules / "heavy.py").write_text("")
    plain, preloaded = shop.run(program), shop.run(program, "heavy")
    assert preloaded[:3] == plain[:3]
    assert preloaded[3].splitlines()[-1:] == plain[3].splitlines()[-1:]


def test_classes_of_the_program_can_be_pickled(shop: Shop) -> None:
    program = "import pickle\nclass Point: x = 1\nprint(pickle.loads(pickle.dumps(Point())).x)"
    assert shop.run(program, "json")[:2] == (0, "1")


def test_what_cannot_be_imported_is_told_and_left_to_the_program(shop: Shop) -> None:
    (shop.modules / "broken.py").write_text("import sys\nprint('half', file=sys.stderr)\nsys.exit('no licence')")
    (shop.modules / "heavy.py").write_text("")
    program = "import sys\nprint('heavy' in sys.modules, file=sys.stderr)\nimport broken"
    status, answer, _, stderr = shop.run(program, "no_such.module", "broken", "heavy")
    assert (status, answer) == (1, None)
    assert "env.program_preload: no_such.module cannot be imported:" in stderr
    assert "ModuleNotFoundError: No module named 'no_such'" in stderr
    assert "env.program_preload: broken cannot be imported:" in stderr
    assert stderr.splitlines()[-3:] == ["True", "half", "no licence"]


def test_a_module_that_ends_the_process_ends_only_a_program_that_imports_it(shop: Shop) -> None:
    (shop.modules / "deadly.py").write_text("import os\nos._exit(9)")
    assert shop.run("print('does without')", "deadly")[:2] == (0, "does without")
    assert shop.run("import deadly", "deadly")[:2] == (9, None)


def test_threads_of_modules_go_on_in_the_program(shop: Shop) -> None:
    (shop.modules / "ticking.py").write_text(
        "import queue, threading\nQ = queue.Queue()\nA = queue.Queue()\n"
        "threading.Thread(target=lambda: A.put(Q.get() + 1), daemon=True).start()"
    )
    program = (
        "import threading, ticking\nticking.Q.put(41)\nprint(ticking.A.get(), threading.current_thread().name)"
    )
    assert shop.run(program, "ticking")[:2] == (0, "42 MainThread")


def test_modules_come_out_of_the_file_that_the_image_has_of_them(tmp_path: Path) -> None:
    venv.create(tmp_path / "python")  # the file is beside its interpreter
    shop = Shop(tmp_path, str(tmp_path / "python" / "bin" / "python"))
    (shop.modules / "heavy.py").write_text(
        "import importlib.metadata\nVALUE, VERSION = 1, importlib.metadata.version('heavy')"
    )
    (shop.modules / "heavy-1.dist-info").mkdir()
    (shop.modules / "heavy-1.dist-info" / "METADATA").write_text("Name: heavy\nVersion: 1\n")
    packed = subprocess.run(
        [shop.python, "-m", "sandbox.boot.packed", "heavy"],
        env={"PATH": os.defpath, "PYTHONPATH": f"{ROOT}:{shop.modules}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert packed.stdout.endswith(f"modules in {tmp_path / 'python' / 'preload.packed'}\n"), packed.stderr
    (shop.modules / "heavy.py").write_text("VALUE = 2")  # not where the pack looks
    tells = (
        "import sys, heavy\nprint(heavy.VALUE, heavy.VERSION, [n for n in sys.modules if n.startswith('sandbox')])"
    )
    assert (end := shop.run(tells, "heavy"))[:2] == (0, "1 1 []"), end
    (shop.modules / "another.py").write_text("")
    os.utime(shop.modules, (1, 1))  # something was installed: the file does not fit any more
    assert shop.run("import heavy\nprint(heavy.VALUE)", "heavy")[:2] == (0, "2")


# ---------------------------------------------------------------- in a sandbox

PROGRAM = """
import json, os, sys, urllib.request
base = os.environ["OPENAI_BASE_URL"]
body = json.dumps({"messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body)) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
print(said, "this" in sys.modules)
"""


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p")


async def test_a_sandbox_preloads_while_it_is_parked(root: Path) -> None:
    script = Script(["forty-two"], kind="program", program={"__main__.py": PROGRAM.encode()})
    end = await run(Places(root, preload=("this", "no_such_module", "concurrent.futures")), script)
    assert (end.code, end.served.answer) == (0, b"forty-two True"), (end.stderr, end.served.results)
    [request] = end.served.completions
    assert request.messages[0].content == "What is it?"
    printed = end.served.steps[-1].observations
    assert printed.index("The Zen of Python") < printed.index("forty-two")  # `this` prints when it is imported
    assert "No module named 'no_such_module'" in printed


@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_worker_that_is_lost_while_it_preloads_is_replaced(kind: str) -> None:
    class Link:
        replaced = 0

        def send(self, message: object, deadline: float) -> None:
            """Takes it."""

        def receive(self, deadline: float) -> None:
            raise WorkerDied(9) if kind == "dies" else StepTimeout

        def replace(self) -> None:
            self.replaced += 1

    link: Any = Link()
    assert preload(link, ("heavy",)).url.startswith("http://127.0.0.1:")
    assert link.replaced == 1


async def test_a_launcher_tells_its_sandboxes_what_to_preload(root: Path) -> None:
    launcher = ProcessLauncher("preload-test", max_sandboxes=1)
    equipment = Equipment(program=(ProgramFile("__main__.py", PROGRAM.encode()),))
    with Channels("preload-test", root) as channels:
        around = Resources(
            launcher, ScriptedCompleter(["forty-two"]), None, channels.directory, equipment=equipment
        )
        spec = a_sandbox("image", preload=("this",))
        attempt = await run_rollout(a_plan(agent=an_agent(kind="program"), sandbox=spec), around)
    assert attempt.record.answer == "forty-two True", attempt
    await launcher.aclose()
