"""The sandbox in its real container: what model-written code cannot reach, and what it cannot break."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from orchestrator.launch.base import Launcher
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.hardening import TERMINALS
from orchestrator.launch.image.build import ensure_image
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.types import SandboxSpec
from tests.fakes import oci_images
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_sandbox, a_writable_sandbox
from tests.fakes.scripted_orchestrator import Script, ScriptedOrchestrator, action
from tests.integration.plain_python import CASES

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Made:
    """Where a test's sandboxes come from. `root`: the agent is root inside, and its root may be written to."""

    launcher: Launcher
    spec: SandboxSpec

    @property
    def root(self) -> bool:
        return self.spec.is_writable


@pytest.fixture(params=["docker", "oci", "oci-writable"])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Made]:
    launcher: Launcher
    spec = a_sandbox(DEFAULT_IMAGE)
    if request.param == "docker":
        await ensure_image(progress=print)  # rebuilt only where the one at hand is not of this source
        launcher = DockerLauncher("inside-the-container", max_sandboxes=1)
    else:
        if (reason := oci_images.why_not()) is not None:
            pytest.skip(reason)
        oci_images.stored_image()
        launcher = OciLauncher("inside-the-container", max_sandboxes=1, waived=WAIVED_WITHOUT_ROOT)
        spec = a_writable_sandbox(DEFAULT_IMAGE) if request.param == "oci-writable" else spec
    yield Made(launcher, spec)
    await launcher.aclose()


async def run(made: Made, script: Script) -> ScriptedOrchestrator:
    """One container from start to end; it must end by itself and without an error of ours."""
    with Channels("inside-the-container") as channels, channels.directory() as channel:
        async with (
            ScriptedOrchestrator(channel, script) as served,
            made.launcher.launch(made.spec, channel) as sandbox,
            asyncio.timeout(DEADLINE_S),
        ):
            end = await sandbox.exited()
    assert end.exit_code == 0, end
    return served


def statuses(text: str) -> dict[str, dict[str, str]]:
    """By process id: the /proc status lines that a step printed."""
    found: dict[str, dict[str, str]] = {}
    for pid, name, value in re.findall(r"^(\d+) (\w+):\t(.*)$", text, re.MULTILINE):
        found.setdefault(pid, {})[name] = value
    return found


async def test_neither_identity_keeps_a_capability(made: Made) -> None:
    look = (
        "import os\nfor pid in filter(str.isdecimal, os.listdir('/proc')):\n"
        "    for line in open(f'/proc/{pid}/status'):\n        print(pid, line, end='')"
    )
    served = await run(made, Script([action(look), action("final_answer(1)")]))
    assert served.park is not None
    told = served.park.confinement
    assert (told.seccomp_mode, told.no_new_privileges, told.root_read_only) == (2, True, not made.root)
    assert list(told.network_interfaces) == ["lo"]
    assert told.capability_bounding_set == 0b11000000  # SETGID, SETUID

    processes = statuses(served.observations[0])
    by_uid = {status["Uid"].split()[0]: status for status in processes.values()}
    if made.root:  # it sees the others as nobody, and has power in a namespace where they are not
        assert set(by_uid) == {"0", "65534"}
        assert by_uid["0"]["Seccomp_filters"] == "2"
        return
    assert set(by_uid) == {"0", str(told.runner_uid), str(told.worker_uid)}
    assert by_uid["0"]["Threads"] == "1"
    for uid in (told.runner_uid, told.worker_uid):
        status = by_uid[str(uid)]
        assert set(status["Uid"].split()) == {str(uid)}
        assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert by_uid[str(told.worker_uid)]["Groups"].strip() == ""
    assert by_uid[str(told.runner_uid)]["Gid"].split() == ["990"] * 4


FORBIDDEN = (
    ("socket.socket(socket.AF_UNIX).connect('/run/channel/box/s')", "PermissionError"),
    ("os.listdir('/run/channel')", "PermissionError"),
    ("open(f'/proc/{runner}/mem', 'rb')", "PermissionError"),
    ("open(f'/proc/{runner}/mem', 'wb')", "PermissionError"),
    ("open(f'/proc/{runner}/environ').read()", "PermissionError"),
    ("open(f'/proc/{runner}/maps').read()", "PermissionError"),
    ("os.listdir(f'/proc/{runner}/fd')", "PermissionError"),
    ("os.listdir(f'/proc/{runner}/root/attachments')", "PermissionError"),
    ("open('/proc/1/mem', 'rb')", "PermissionError"),
    ("open('/proc/1/environ').read()", "PermissionError"),
    ("os.kill(runner, signal.SIGKILL)", "PermissionError"),
    ("os.kill(runner, signal.SIGSTOP)", "PermissionError"),
    ("os.kill(1, signal.SIGTERM)", "PermissionError"),
    ("open('/attachments/secret.txt', 'a')", "PermissionError"),
    ("os.unlink('/attachments/secret.txt')", "PermissionError"),
    ("open('/opt/sandbox/x', 'w')", "Read-only file system"),
    ("os.nice(-5)", "PermissionError"),
    ("resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))", "ValueError"),
    ("ctypes.CDLL(None).ptrace(16, runner, 0, 0)", "snippet:\n-1"),
)
FORBIDDEN_TO_OTHERS_THAN_ROOT = (
    ("os.setuid(0)", "PermissionError"),
    ("os.setgid(990)", "PermissionError"),
    ("socket.socket(socket.AF_INET)", "PermissionError"),
)


async def test_the_code_reaches_neither_the_channel_nor_the_runner_nor_pid_1(made: Made) -> None:
    find_runner = (
        "import ctypes, os, resource, signal, socket\n"
        "[runner] = {int(p) for p in os.listdir('/proc') if p.isdecimal()} - {1, os.getpid()}"
    )
    forbidden = FORBIDDEN if made.root else FORBIDDEN + FORBIDDEN_TO_OTHERS_THAN_ROOT
    script = Script(
        [action(find_runner), *(action(code) for code, _ in forbidden), action("final_answer('intact')")],
        attachments={"secret.txt": b"the question's own file"},
        max_steps=len(forbidden) + 2,
    )
    served = await run(made, script)
    outcomes = dict(zip((code for code, _ in forbidden), served.observations[1:], strict=True))
    for code, refusal in forbidden:
        assert refusal in outcomes[code], f"{code}: {outcomes[code]}"
    assert served.answer == b"intact"
    assert len(served.results) == 1


@pytest.mark.slow
async def test_what_breaks_a_worker_is_an_observation(made: Made) -> None:
    script = Script(
        [
            action("import os\nos._exit(9)"),
            action("x = bytearray(2 << 30)"),
            action("open('/workspace/full', 'wb').write(bytes(2 << 30))"),
            action("[open('/dev/null') for _ in range(10**5)]"),
            action("final_answer('finished')"),
        ],
        step_timeout_s=120.0,
    )
    served = await run(made, script)
    exited, memory, disk, files = served.observations
    assert "ended with exit code 9" in exited
    assert "used too much memory" in memory
    assert "used too much memory" in disk or "No space left" in disk
    assert "Too many open files" in files
    assert served.answer == b"finished"


@pytest.mark.long
async def test_what_keeps_a_worker_busy_is_stopped_with_all_it_started(made: Made) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    count = "import os\nlen([p for p in os.listdir('/proc') if p.isdecimal()])"
    actions = ("while True: pass", bomb, count, "final_answer('finished')")
    script = Script([action(code) for code in actions], step_timeout_s=5.0)
    served = await run(made, script)
    endless, forks, processes = served.observations
    assert "longer than 5 seconds" in endless
    assert "longer than 5 seconds" in forks
    assert processes.endswith("\n3")  # pid 1, the runner, the worker: of the fork bomb nothing is left
    assert served.answer == b"finished"


@pytest.mark.long
async def test_the_code_cannot_stop_what_kills_it(made: Made) -> None:
    # Whoever could stop its killer would live on behind the next step.
    stopper = (
        "import os, signal\n"
        "mine, done = os.getpid(), 0\n"
        "while True:\n"
        "    for pid in map(int, filter(str.isdecimal, os.listdir('/proc'))):\n"
        "        if pid > mine and pid != os.getpid():\n"
        "            try:\n"
        "                os.kill(pid, signal.SIGSTOP)\n"
        "                os.write(os.open('/workspace/stopped', os.O_CREAT | os.O_WRONLY), b'x')\n"
        "            except OSError: pass"
    )
    script = Script(
        [
            *([action(stopper)] * 3),
            action("import os\nos.path.exists('/workspace/stopped')"),
            action("final_answer('killed')"),
        ],
        step_timeout_s=4.0,
    )
    served = await run(made, script)
    assert all("longer than 4 seconds" in observation for observation in served.observations[:3])
    assert served.observations[3].endswith("False")
    assert served.answer == b"killed"


async def test_pseudo_terminals_work_and_are_few(made: Made) -> None:
    say = "import os, pty\npid, line = pty.fork()\nif pid == 0: os.execlp('sh', 'sh', '-c', 'tty; stty size')"
    read = "said = b''\ntry:\n    while more := os.read(line, 99): said += more\nexcept OSError: pass\nsaid"
    hold = "held = []\ntry:\n    while True: held.append(pty.openpty())\nexcept OSError as error: print(error)"
    script = Script(
        [
            *(action(say), action(read)),
            action("os.close(line), os.waitpid(pid, 0)[1]"),
            action(hold),
            action("len(held), os.ttyname(held[0][1]), sorted(os.listdir('/dev/pts'))[0]"),
            action("final_answer('typed')"),
        ]
    )
    served = await run(made, script)
    assert served.park is not None
    assert {one.name: one.value for one in served.park.confinement.limits}["terminals"] == TERMINALS
    assert "b'/dev/pts/0\\r\\n0 0\\r\\n'" in served.observations[1]
    assert served.observations[2].endswith("(None, 0)")
    assert served.observations[4].endswith(f"({TERMINALS}, '/dev/pts/0', '0')")
    assert served.answer == b"typed"


async def test_pools_are_as_large_as_what_the_sandbox_may_use(made: Made) -> None:
    count = (
        "import os, subprocess, multiprocessing, concurrent.futures as futures\n"
        "def size(pool):\n    with pool: return pool._max_workers\n"
        "(os.cpu_count(), os.process_cpu_count(), multiprocessing.cpu_count(), len(os.sched_getaffinity(0)),"
        " size(futures.ProcessPoolExecutor()), size(futures.ThreadPoolExecutor()) - 4,"
        " int(subprocess.check_output('nproc')),"
        " int(subprocess.check_output(['python', '-c', 'import os; print(os.cpu_count())'])))"
    )
    served = await run(made, Script([action(count), action("final_answer(1)")]))
    assert served.observations[0].endswith(str((1,) * 8)), "one CPU of this machine's"


async def test_standard_output_can_be_opened_by_name(made: Made) -> None:
    by_name = (
        "import os\nwith open('/dev/stdout', 'w') as out: out.write('one ')\n"
        "with open('/dev/fd/2', 'a') as out: out.write('two ')\n"
        "_ = os.system('echo three | tee /dev/stderr > /dev/null')"
    )
    served = await run(made, Script([action(by_name), action("final_answer(1)")]))
    assert "one two three" in served.observations[0]


@pytest.mark.long
async def test_a_worker_that_stops_its_killers_is_wiped_all_the_same(made: Made) -> None:
    stop_all = (
        "import os, signal, time\n"
        "for _ in range(40):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.5)\n"
        "        while True: os.kill(-1, signal.SIGSTOP)\n"
        "while True: time.sleep(1)"
    )
    script = Script([*([action(stop_all)] * 5), action("final_answer('wiped')")], step_timeout_s=4.0)
    served = await run(made, script)
    assert all("longer than 4 seconds" in observation for observation in served.observations)
    assert served.answer == b"wiped"


@pytest.mark.long
async def test_three_memory_kills_running_end_the_episode(made: Made) -> None:
    served = await run(made, Script([action("x = bytearray(2 << 30)")] * 5))
    assert served.stop_reason == "OUT_OF_MEMORY"
    assert len(served.completions) == 3


async def test_the_deferred_packages_and_subprocesses_work_in_the_image(made: Made) -> None:
    script = Script(
        [
            action("import PIL.Image, requests, huggingface_hub, rich.markdown\nPIL.Image.new('1', (2, 3)).size"),
            action(
                "import subprocess\n"
                "subprocess.check_output(['python', '-c', 'import sys; print(sys.version_info[:2])'])"
            ),
            action("import multiprocessing\nlock = multiprocessing.Lock()\nlock.acquire()"),
            action(
                "from concurrent.futures import ProcessPoolExecutor\n"
                "with ProcessPoolExecutor(2) as pool:\n"
                "    squares = list(pool.map(pow, [1, 2, 3], [2, 2, 2]))\nsquares"
            ),
            action("final_answer(0.1 + 0.2)"),
        ]
    )
    served = await run(made, script)
    size, version, lock, squares = served.observations
    assert size.endswith("(2, 3)")
    assert re.search(r"b'\(3, \d+\)", version)
    assert lock.endswith("True")
    assert squares.endswith("[1, 4, 9]")
    assert served.answer == b"0.30000000000000004"


REAL_PYTHON = (
    (
        "import dataclasses, functools\n@dataclasses.dataclass\nclass Point:\n    x: int\n    def twice(self):\n"
        "        return Point(2 * self.x)\nPoint(4).twice()",
        "Point(x=8)",
    ),
    (
        "def squares():\n    n = 0\n    while True:\n        yield n * n\n        n += 1\nstream = squares()",
        "generator",
    ),
    ("import itertools\n[*itertools.islice(stream, 4)], next(stream)", "([0, 1, 4, 9], 16)"),
    (
        "match {'kind': 'a', 'n': [1, 2]}:\n    case {'kind': 'a', 'n': [first, *_]}:\n        print(first)",
        "\n1\n",
    ),
    ("import asyncio\nasync def work(n):\n    await asyncio.sleep(0.01)\n    return n\nawait work(7)", "\n7"),
    ("results = await asyncio.gather(*(work(n) for n in range(3)))\nresults", "[0, 1, 2]"),
    (
        "process = await asyncio.create_subprocess_exec('cat', stdin=-1, stdout=-1)\n"
        "(await process.communicate(b'piped'))[0]",
        "b'piped'",
    ),
    ("async with asyncio.timeout(9):\n    async for_each = None\n", "SyntaxError"),
    ("with open('notes.txt', 'w') as notes:\n    notes.write('kept')\nopen('notes.txt').read()", "kept"),
    ("eval('6 * 7'), exec('made = 5'), made", "(42, None, 5)"),
    (
        "import subprocess\nsubprocess.run('echo $((40 + 2))', shell=True, capture_output=True, text=True).stdout",
        "42",
    ),
    (
        "import multiprocessing\nclass Named:\n    def __init__(self, n): self.n = n\n"
        "def named(n): return Named(n)\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print([x.n for x in pool.map(named, [1, 2])])",
        "[1, 2]",
    ),
    (
        "import threading\nbox = []\nt = threading.Thread(target=box.append, args=[3])\nt.start(); t.join()\nbox",
        "[3]",
    ),
    ("import PIL._imaging, sqlite3\nsqlite3.connect(':memory:').execute('select 6 * 7').fetchone()", "(42,)"),
    ("import pickle\npickle.loads(pickle.dumps(Point(1)))", "Point(x=1)"),
    (
        "try:\n    raise ExceptionGroup('several', [ValueError(1)])\nexcept* ValueError as group:\n"
        "    print(group)",
        "several",
    ),
    ("print('before')\n{}['key']", "KeyError: 'key'"),
    ("import sys, warnings\nprint('to stderr', file=sys.stderr)\nwarnings.warn('mind')", "to stderr"),
    ("x: int = 5\ndel x\ny = (z := 3) + 1\nf'{y=} {z!r:>3}'", "y=4   3"),
    ("import ctypes\nctypes.CDLL(None).abs(-3)", "\n3"),
)


async def test_everything_cpython_can_do_works_in_a_step(made: Made) -> None:
    steps = [code for code, _ in REAL_PYTHON]
    served = await run(
        made, Script([*map(action, steps), action("final_answer(0.1 + 0.2)")], max_steps=len(steps) + 1)
    )
    for (code, expected), observed in zip(REAL_PYTHON, served.observations, strict=True):
        assert expected in observed, f"{code}\n--> {observed}"
    failed = served.observations[[code for code, _ in REAL_PYTHON].index("print('before')\n{}['key']")]
    assert "before" in failed  # what was printed before an exception arrives with it
    assert "sandbox/" not in failed  # and nothing of ours
    assert served.answer == b"0.30000000000000004"


async def test_a_step_does_what_plain_python_does_in_the_image_too(made: Made) -> None:
    cases = [
        (code.replace("os.getcwd()", "'/root'"), "\nroot" if "getpass" in code else told) for code, told in CASES
    ]
    cases = cases if made.root else CASES
    steps = [action(code) for code, _ in cases]
    served = await run(made, Script([*steps, action("final_answer('done')")], max_steps=len(steps) + 1))
    for (code, expected), observed in zip(cases, served.observations, strict=True):
        assert expected in observed, f"{code}\n--> {observed}"
