"""Programs in forked sandboxes find their modules imported once for all of them, and else what they would find."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents.equipment import Equipment, ProgramFile
from orchestrator.errors import LaunchError
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.launch.channels import Channels
from orchestrator.launch.oci import parents
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_no_forks
from orchestrator.types import Attempt, SandboxSpec
from tests.fakes import oci_images
from tests.fakes.archives import Entry, file, folder, layer, saved
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.foreign_images import ARCHITECTURE
from tests.fakes.plans import a_plan, a_sandbox, a_writable_sandbox, an_agent

_WHY_NOT = oci_images.why_not() or why_no_forks("runc")
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]

ASK = """
import json, os, sys, urllib.request
TASK = sys.stdin.read()
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": TASK}]}).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
SAID = ask()
"""
TELLS = (
    ASK
    + """
import atexit, builtins, gc, logging, signal, threading, warnings
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "task": TASK, "cwd": os.getcwd(),
    "environment": {name: text for name, text in os.environ.items() if "URL" not in name},
    "name": __name__, "file": __file__, "package": __package__, "spec": [__spec__.name, __spec__.origin],
    "main": __import__("__main__").os is os, "names": sorted(globals()), "builtins": type(__builtins__).__name__,
    "print": repr(print), "flags": str(sys.flags), "finders": [str(each) for each in sys.meta_path],
    "descriptors": sorted(os.listdir("/proc/self/fd")), "kinds": [oct(os.fstat(fd).st_mode) for fd in range(3)],
    "signals": str([signal.getsignal(number) for number in sorted(signal.valid_signals())]),
    "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "warnings": str(warnings.filters),
    "streams": [str([s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through])
                for s in (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)],
    "hooks": [str(sys.excepthook), str(sys.displayhook), str(sys.unraisablehook), str(threading.excepthook)],
    "depth": sys.getrecursionlimit(), "handlers": str(logging.root.handlers), "umask": os.umask(0o22),
    "url": os.environ["OPENAI_BASE_URL"], "threads": threading.active_count(),
    "thread": threading.current_thread().name, "cpus": [str(os.cpu_count), len(os.sched_getaffinity(0))],
    "loggers": sorted(logging.root.manager.loggerDict), "temporary": __import__("tempfile").tempdir,
    "ids": [os.getresuid(), os.getresgid(), os.getgroups()], "set": str({"a", "b", "c", "d"}),
    "ours": sorted(name for name in sys.modules if name.partition(".")[0] in ("sandbox", "smolagents", "grpc")),
    "limits": open("/proc/self/limits").read().split(), "zone": __import__("time").tzname,
    "settings": [__import__("socket").getdefaulttimeout(), gc.get_threshold(), sys.getswitchinterval()],
    "status": [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNew", "Seccomp"))],
}
facts["heavy"] = "heavy" in sys.modules
import heavy, beside
facts |= {"beside": beside.__file__, "seen": heavy.SEEN, "tools": heavy.tools.__file__, "lib": heavy.yaml}
print(json.dumps(facts))
"""
)
HEAVY = """
import gc, logging, os, socket, sys, tempfile, textwrap
import heavy.tools
try:
    import yaml
    yaml = yaml.__file__
except ImportError:
    yaml = "none"
SEEN = {
    "cwd": os.getcwd(), "writes": os.access(".", os.W_OK), "home": os.path.expanduser("~"),
    "ids": os.getresuid()[:2],
    "environment": dict(os.environ), "cpus": os.cpu_count(), "root": sorted(os.listdir("/")), "path": sys.path,
    "devices": sorted(os.listdir("/dev")), "argv": len(sys.argv) > 1, "file": __file__,
}
os.environ.update(SET="by a module", A="by a module", TZ="Asia/Tokyo")
del os.environ["LOGNAME"]
gc.set_threshold(5000)
sys.setswitchinterval(0.01)
socket.setdefaulttimeout(100)
print("imported")
"""


def image_with(folder_: Path, *entries: Entry, env: Sequence[str] = ()) -> str:
    """The path of an image with these files, and nothing else."""
    config = {"architecture": ARCHITECTURE[os.uname().machine], "os": "linux", "config": {"Env": list(env)}}
    folders = [folder("opt"), folder("opt/packages"), folder("opt/packages/heavy")]
    return str(saved(folder_ / "image.tar", layer(*folders, *entries), config=config))


def module(name: str, text: str) -> Entry:
    return file(f"opt/packages/{name}", textwrap.dedent(text).encode())


class Bench:
    """Runs programs in sandboxes of one launcher. `lines`: what it logs."""

    def __init__(self, around: Resources, lines: list[str]) -> None:
        self._around, self.lines, self.launcher = around, lines, around.launcher

    async def run(self, program: str, spec: SandboxSpec) -> Attempt:
        files = (ProgramFile("__main__.py", program.encode()), ProgramFile("beside.py", b""))
        around = replace(self._around, equipment=Equipment(program=files))
        return await run_rollout(a_plan(agent=an_agent(kind="program"), sandbox=spec), around)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this test."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


@asynccontextmanager
async def bench(run: str, start: Any) -> AsyncIterator[Bench]:
    oci_images.stored_image()
    lines: list[str] = []
    told = logging.getLogger(parents.__name__)
    told.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    launcher = OciLauncher(run, max_sandboxes=4, start=start, advise=lambda line: None, allow_localhost_tcp=True)
    with Channels(run) as channels:
        around = Resources(launcher, ScriptedCompleter(["forty-two"] * 40), None, channels.directory)
        try:
            yield Bench(around, lines)
        finally:
            told.removeHandler(handler)
            await launcher.aclose()


def usual(told: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from sandbox to sandbox: the program's folder, uids, and limits that are shared."""
    place = str(told["file"].removesuffix("/__main__.py"))
    seen, limits = told["seen"], told["limits"]
    for facts, names in ((told, ("url", "ids")), (seen, ("writes", "ids"))):
        for name in names:
            del facts[name]
    seen["environment"] = {name: text for name, text in seen["environment"].items() if "127.0.0.1" not in text}
    seen["environment"].pop("ANSWER_FILE", None)
    at = limits.index("pending")
    del limits[at + 2 : at + 4]
    cleaned: dict[str, Any] = json.loads(json.dumps(told).replace(place, "PROGRAM"))
    return cleaned


@pytest.fixture
def spec(temporary: Path) -> SandboxSpec:
    """Of sandboxes with a module that prints at its end."""
    text = "import atexit, time\nBORN, STATE, LAST = time.time_ns(), [], []\natexit.register(lambda: print(*LAST))"
    return a_sandbox(image_with(temporary, module("heavy/__init__.py", text)), preload=("heavy",))


@pytest.fixture
async def warm(run: str, temporary: Path) -> AsyncIterator[Bench]:
    async with bench(run, "fork") as here:
        yield here


@pytest.mark.parametrize("root", ["read-only", "writable"])
async def test_a_program_finds_what_it_would_find_without(run: str, temporary: Path, root: str) -> None:
    image = image_with(temporary, module("heavy/__init__.py", HEAVY), module("heavy/tools.py", "X = 1"))
    spec = (a_sandbox if root == "read-only" else a_writable_sandbox)(image, preload=("heavy", "decimal"))
    told = {}
    for start in ("run", "fork"):
        async with bench(run, start) as here:
            attempt = await here.run(TELLS, spec)
            assert attempt.record.answer, attempt
            told[start] = json.loads(attempt.record.answer)
            assert here.lines == []
            assert attempt.record.steps[-1].observations.count("imported\n") == 1
    assert told["fork"]["seen"]["environment"]["OPENAI_BASE_URL"] == told["fork"]["url"]
    assert usual(told["fork"]) == usual(told["run"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "answer", "detail"),
    [
        ("raise SystemExit(3)", None, "exit code 3"),
        ("raise SystemExit('it broke')", None, "exit code 1: it broke"),
        ("1 / 0", None, "exit code 1: ZeroDivisionError: division by zero"),
        ("raise KeyboardInterrupt", None, "exit code -2: KeyboardInterrupt"),
        ("raise SystemExit(1 << 70)", None, "exit code 255"),
        ("import os\nprint(9)\nos.close(1)", None, "exit code 120: OSError: [Errno 9] Bad file descriptor"),
        ("import sys\nsys.excepthook = lambda *error: sys.exit(9)\n1 / 0", None, "exit code 9"),
        ("import sys\ndel sys.excepthook\n1 / 0", None, "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.excepthook = lambda *error: [][0]\n1 / 0", None, "IndexError: list index out of range"),
        ("import os\nos._exit(4)", None, "exit code 4"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", None, "exit code -15"),
        ("import os\nopen(os.environ['ANSWER_FILE'], 'w').write('filed')\nprint('no')", "filed", ""),
        ("import os\nleft = open(os.environ['ANSWER_FILE'], 'w')\nleft.write('not closed')", "not closed", ""),
        (
            "import subprocess, sys, threading, time\n"
            "sleep = [sys.executable, '-c', 'import time; time.sleep(999)']\n"
            "child = subprocess.Popen(sleep, stdin=-1, stdout=-3, stderr=-3)\n"
            "threading.Thread(target=child.stdin.write, args=[b'x' * 200000], daemon=True).start()\n"
            "time.sleep(0.5)\nprint('written')",
            "written",
            "",
        ),
        ("import sys\nprint(9)\nsys.stdout.close()\nsys.stderr = None", "9", ""),
        (
            "import io, os\nclass Packed(io.BufferedIOBase):\n    file = open(os.environ['ANSWER_FILE'], 'w')\n"
            "    def close(self): self.file.write('the end')\nleft = Packed()",
            "the end",
            "",
        ),
        ("import atexit\natexit.register(print, 'last')\nprint('first')", "last", ""),
        ("import heavy\nheavy.LAST.append('told at the end')", "told at the end", ""),
        ("import threading, time\nthreading.Thread(target=lambda: time.sleep(0.3) or print(4)).start()", "4", ""),
        ("import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(11)'])", "11", ""),
        ("import sys\nsys.stdout.buffer.write(b'x' * 300000 + b'\\n7\\n')", "7", ""),
        ("import pickle\nclass Point: x = 1\nprint(pickle.loads(pickle.dumps(Point())).x)", "1", ""),
        (
            "import asyncio\nasync def f(): return await asyncio.to_thread(int, '5')\nprint(asyncio.run(f()))",
            "5",
            "",
        ),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(3)'])", "3", ""),
        ("import multiprocessing as m\nprint(m.get_context('fork').cpu_count())", "1", ""),
    ],
)
async def test_a_program_ends_as_it_would_end(
    warm: Bench, spec: SandboxSpec, program: str, answer: str | None, detail: str
) -> None:
    attempt = await warm.run(ASK + program, spec)
    assert (attempt.record.answer, warm.lines) == (answer, []), attempt
    assert detail in str(attempt.outcome), attempt


async def test_modules_are_imported_once_for_all_and_no_program_sees_what_another_did(
    warm: Bench, spec: SandboxSpec
) -> None:
    program = ASK + "import heavy, random\nheavy.STATE.append(1)\n"
    program += "heavy.LAST += [heavy.BORN, len(heavy.STATE), random.random()]"
    specs = [replace(spec, memory_bytes=spec.memory_bytes + (number << 20)) for number in range(3)]
    told = [str((await warm.run(program, each)).record.answer).split() for each in specs]
    assert len({born for born, _, _ in told}) == 1
    assert {length for _, length, _ in told} == {"1"}
    assert len({drawn for _, _, drawn in told}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "1 threads"),
        ("import socket\nkept = socket.socket(socket.AF_UNIX)", "opens socket:"),
        ("import select\nkept = select.epoll()", "opens anon_inode:[eventpoll]"),
        ("kept = open('/dev/urandom', 'rb')", "opens /dev/urandom"),
        ("import mmap\nkept = mmap.mmap(-1, 4096)", "memory that would be common to all"),
        ("import os\nif not os.fork(): os.execv('/opt/sandbox/bin/python', ['p', '-c', 'input()'])", "processes"),
        (
            "import os, time\nif not (child := os.fork()):\n    if not os.fork():\n        os.closerange(0, 99)\n"
            "        time.sleep(999)\n    os._exit(0)\n"
            "os.waitpid(child, 0)",
            "starts processes",
        ),
        ("raise SystemExit('no licence')", "heavy cannot be imported: SystemExit: no licence"),
        ("import os\nos._exit(9)", "ended before it was ready"),
        ("import os\nos.umask(0o077)", "changes its process: Umask"),
        ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 600)", "sets a timer"),
        ("import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))", "breaks what is forked"),
        (
            "import time\ndef sleep(s, own=time.sleep): own(s)\ntime.sleep = sleep",
            "changes Python's own time.sleep",
        ),
        ("import os\nos.setresuid(20000, 20000, 20000)", "Operation not permitted"),
        ("import sys\nsys.monitoring.use_tool_id(3, 'heavy')", "watches what Python does"),
        (
            "import os, threading\nkept = threading.Thread(target=threading.Event().wait, daemon=True)\n"
            "os.register_at_fork(after_in_parent=kept.start)",
            "starts 1 threads",
        ),
    ],
)
async def test_what_cannot_be_forked_is_imported_in_each_sandbox(
    run: str, temporary: Path, does: str, why: str
) -> None:
    spec = a_sandbox(image_with(temporary, module("heavy/__init__.py", does)), preload=("heavy",))
    async with bench(run, "fork") as here:
        for _ in range(2):
            attempt = await here.run(ASK + "print(SAID)", spec)
            assert attempt.record.answer == "forty-two", attempt
        (line,) = here.lines
    assert line.startswith("each sandbox of ")
    assert why in line


# An audit hook of C is kept from none of ours. The fork is pid 1 from its first moment.
_HOOK = """
import ctypes, os
def ended(event, about, data):
    if event == b"{event}" and os.getpid() == 1:
        os._exit(9)
    return 0
KEPT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.py_object, ctypes.c_void_p)(ended)
ctypes.pythonapi.PySys_AddAuditHook(KEPT, None)
"""


@pytest.mark.parametrize(
    ("event", "why"),
    [("socket.sethostname", "it ended with 9"), ("os.fork", "the sandbox ended at start: exit code 9")],
)
async def test_where_no_fork_gets_ready_sandboxes_soon_import_for_themselves(
    run: str, temporary: Path, event: str, why: str
) -> None:
    """Before it is sealed, or after."""
    does = _HOOK.format(event=event)
    spec = a_sandbox(image_with(temporary, module("heavy/__init__.py", does)), preload=("heavy",))
    async with bench(run, "fork") as here:
        for _ in range(2):
            with pytest.raises(LaunchError, match=why):
                await here.run(ASK + "print(SAID)", spec)
            assert here.lines == []
        for _ in range(2):
            attempt = await here.run(ASK + "import heavy\nprint(SAID)", spec)
            assert attempt.record.answer == "forty-two", attempt
        (line,) = here.lines
        assert here.launcher.now().parents == 1
    assert line.startswith("each sandbox of ")
    assert "what is forked with it does not get ready: " in line
    assert why in line


async def test_that_modules_cannot_be_shared_is_found_out_once_however_many_wait(
    run: str, temporary: Path
) -> None:
    does = "import socket\nkept = socket.socket(socket.AF_UNIX)"
    spec = a_sandbox(image_with(temporary, module("heavy/__init__.py", does)), preload=("heavy",))
    async with bench(run, "fork") as here:
        attempts = await asyncio.gather(*(here.run(ASK + "print(SAID)", spec) for _ in range(3)))
        assert [attempt.record.answer for attempt in attempts] == ["forty-two"] * 3
        (line,) = here.lines
    assert "opens socket:" in line


async def test_an_image_has_its_own_versions_of_what_sandboxes_import(run: str, temporary: Path) -> None:
    """As programs do with frameworks: each side finds its own."""
    text = "import grpc, smolagents, yaml, google.protobuf as p\nNAMES = [grpc.X, p.X]"
    names = ("grpc.py", "smolagents.py", "yaml.py", "google/__init__.py", "google/protobuf.py")
    theirs = [file(f"theirs/{name}", b"X = 'theirs'") for name in names]
    own = (folder("theirs"), folder("theirs/google"), *theirs, module("heavy/__init__.py", text))
    image = image_with(
        temporary, *own, env=["PYTHONPATH=/theirs", "A=b", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python"]
    )
    program = ASK + "import heavy, os, grpc\nprint(heavy.NAMES, grpc.__file__, os.environ['A'], SAID)"
    async with bench(run, "fork") as here:
        attempt = await here.run(program, a_sandbox(image, preload=("heavy",)))
        assert here.lines == []
    assert attempt.record.answer == "['theirs', 'theirs'] /theirs/grpc.py b forty-two", attempt


@pytest.mark.parametrize(
    "does",
    [
        "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "import sys, types\nsys.modules['smolagents'] = sys.modules['google'] = types.ModuleType('google')",
        "import sys\nsys.modules['yaml'] = None\nsys.path.append(None)",
        # As filelock watches for forks. Our processes do not have the program's variables.
        "import os, sys\nsys.addaudithook(lambda *about: os.environ['OPENAI_BASE_URL'])",
        # As importlib_metadata does.
        "from importlib.machinery import PathFinder\ndel PathFinder.find_distributions",
        # As modules that are loaded when somebody looks at them: whoever asks has them do something.
        "class Lazy:\n    @property\n    def __class__(self): raise SystemExit('asked')\nKEPT = Lazy()",
    ],
)
async def test_what_modules_leave_in_python_is_none_of_ours(run: str, temporary: Path, does: str) -> None:
    spec = a_sandbox(image_with(temporary, module("heavy/__init__.py", does)), preload=("heavy",))
    async with bench(run, "fork") as here:
        attempt = await here.run(ASK + "import heavy\nprint(SAID)", spec)
        assert here.lines == []
    assert attempt.record.answer == "forty-two", attempt


async def test_our_processes_are_not_watched_and_keep_their_settings(run: str, temporary: Path) -> None:
    does = "import gc, socket, sys\nSEEN = set()\nsocket.setdefaulttimeout(0.001)\n"
    does += (
        "def watch(frame, *_): SEEN.add(frame.f_code.co_filename)\nsys.settrace(watch)\nsys.setprofile(watch)\n"
    )
    does += "gc.callbacks.append(lambda *_: watch(sys._getframe(1)))"
    program = (
        "import gc, heavy, socket, sys\nkept = [socket.getdefaulttimeout(), len(gc.callbacks), sys.gettrace()]\n"
    )
    program += "socket.setdefaulttimeout(None)\n" + ASK + "kept += [sys.getprofile(), heavy.watch]\n"
    program += "ours = [name for name in heavy.SEEN if '/pid1/' in name]\nprint(kept[:2], len({*kept[2:]}), ours)"
    spec = a_sandbox(image_with(temporary, module("heavy/__init__.py", does)), preload=("heavy",))
    async with bench(run, "fork") as here:
        attempt = await here.run(program, spec)
        assert here.lines == []
    assert attempt.record.answer == "[0.001, 1] 1 []", attempt


async def test_what_an_image_has_python_do_at_its_start_is_not_done_by_ours(run: str, temporary: Path) -> None:
    does = b"import os, socket\nUID = os.getuid()\nsocket.setdefaulttimeout(0.001)\nprint('customized')"
    own = (folder("theirs"), file("theirs/sitecustomize.py", does), module("heavy/__init__.py", ""))
    program = "import os, socket, sys\nkept = socket.getdefaulttimeout()\nsocket.setdefaulttimeout(None)\n" + ASK
    program += "import sitecustomize\nprint(sys.path[1:3], kept, sitecustomize.UID != 0)"
    spec = a_sandbox(image_with(temporary, *own, env=["PYTHONPATH=/theirs:theirs:/theirs"]), preload=("heavy",))
    told = []
    for start in ("run", "fork"):
        async with bench(run, start) as here:
            attempt = await here.run(program, spec)
            assert here.lines == []
            told.append([attempt.record.answer, attempt.record.steps[-1].observations])
    assert str(told[0][0]).endswith(" 0.001 True"), told
    assert told[0] == told[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable",
    [
        "PYTHONWARNINGS=all:0:antigravity.x:0:0",  # this module of Python's starts BROWSER
        "PYTHONOPTIMIZE=2",
        "GLIBC_TUNABLES=glibc.malloc.perturb=1",
        "LD_BIND_NOW=1",
        "LD_LIBRARY_PATH=/theirs",
    ],
)
async def test_variables_of_an_image_that_act_on_whatever_starts_act_on_none_of_ours(
    run: str, temporary: Path, variable: str
) -> None:
    """Of sandboxes that are not forked pid 1 does not have them. They act on programs alone, in both."""
    names = ("libc.so.6", "libssl.so.3", "libstdc++.so.6", "libz.so.1")
    browser = b"import os\nopen('/tmp/who', 'w').write('root' if os.getuid() == 0 else 'the agent')"
    theirs = [folder("theirs"), *(file(f"theirs/{name}", b"broken") for name in names)]
    heavy = "import os\nSEEN = open('/tmp/who').read() if os.path.exists('/tmp/who') else 'nobody'"
    own = [*theirs, file("theirs/browser.py", browser), module("heavy/__init__.py", heavy)]
    env = [variable, "BROWSER=/opt/sandbox/bin/python /theirs/browser.py %s", "PYTHONUNBUFFERED=1"]
    spec = a_sandbox(image_with(temporary, *own, env=env), preload=("heavy", "ssl"))
    name = variable.partition("=")[0]
    program = ASK + f"import heavy\nprint(heavy.SEEN, sys.flags, os.environ[{name!r}])"
    told = []
    for start in ("run", "fork"):
        async with bench(run, start) as here:
            told.append((await here.run(program, spec)).record.answer)
            if start == "fork" and name != "LD_LIBRARY_PATH":
                (line,) = here.lines
                assert line.endswith(f": variables of its image would act on all that is forked: {name}")
            else:
                assert here.lines == []
    assert told[0] == told[1]
    assert str(told[0]).startswith("the agent" if name == "PYTHONWARNINGS" else "nobody")


async def test_no_process_of_a_sandbox_has_the_number_of_the_one_that_imported(run: str, temporary: Path) -> None:
    """Generators of random numbers as OpenSSL's know by their process' number that they were forked."""
    spec = a_sandbox(
        image_with(temporary, module("heavy/__init__.py", "import os\nPID = os.getpid()")), preload=("heavy",)
    )
    async with bench(run, "fork") as here:
        attempt = await here.run(ASK + "import heavy\nprint(heavy.PID)", spec)
    assert int(str(attempt.record.answer)) > 300, attempt


async def test_numbers_drawn_by_numpy_differ_though_it_was_seeded_at_its_import(run: str, temporary: Path) -> None:
    own = [folder("opt/packages/numpy"), module("numpy/__init__.py", "import numpy.random")]
    own.append(module("numpy/random.py", "SEEDED = []\ndef seed(): SEEDED.append(1)"))
    spec = a_sandbox(image_with(temporary, *own), preload=("numpy",))
    async with bench(run, "fork") as here:
        attempt = await here.run(ASK + "import numpy\nprint(numpy.random.SEEDED)", spec)
    assert attempt.record.answer == "[1]", attempt
