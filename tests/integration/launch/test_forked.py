"""Sandboxes that are forked from one parent: what they share, what they do not, and what is left."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from orchestrator.errors import EnvironmentUnusable, LaunchError, SandboxLostError
from orchestrator.host.sandbox import parked_sandbox
from orchestrator.launch.channels import PREFIX, Channels
from orchestrator.launch.control_groups import control_groups, group_files
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci import fork_bundles, parents
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_no_forks
from orchestrator.launch.oci.parent_ids import parent_ids
from orchestrator.launch.oci.runtime import Runtime
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.types import SandboxSpec
from tests.fakes import oci_images
from tests.fakes.plans import a_sandbox
from tests.integration.launch.probes import eventually, oci_launcher_for, oci_probed

_WHY_NOT = oci_images.why_not() or why_no_forks("runc")
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]

FOREVER = "import signal\nsignal.pause()"
HANG_S = 120.0


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this test."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


@pytest.fixture
async def many(run: str, temporary: Path) -> Any:
    """So many sandboxes at a time, as a run parks them, and their launcher."""
    oci_images.stored_image()
    launcher = OciLauncher(run, max_sandboxes=8, start="fork", advise=lambda line: None)
    async with AsyncExitStack() as stack:
        channels = stack.enter_context(Channels(run))

        async def park(count: int) -> list[OciSandbox]:
            known = set(launcher._live)
            spec = a_sandbox(DEFAULT_IMAGE)
            for _ in range(count):
                await stack.enter_async_context(parked_sandbox(spec, launcher, channels.directory))
            return [sandbox for name, sandbox in launcher._live.items() if name not in known]

        yield launcher, park, stack
    await launcher.aclose()
    assert list(temporary.glob(f"{PREFIX}*/state/*")) == []


def parent_of(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def box_of(pid: int) -> int:
    """Pid 1 of the box that a sandbox was forked in: the parent of the template, which is its own."""
    return parent_of(parent_of(pid))


def below(pid: int) -> list[int]:
    """It, and all processes that come from it."""
    return [pid, *(each for child in children(pid) for each in below(child))]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def mounts_of(pid: int) -> int:
    """Of ours: a keeper also sees what the machine's other users mount."""
    return sum("orchestrator" in line for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines())


def descriptors(pid: int) -> dict[str, str]:
    return {entry.name: os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}


# ---------------------------------------------------------------- what is shared, and what is not


async def test_siblings_have_one_parent_and_nothing_else_in_common(many: Any) -> None:
    _, park, _ = many
    one, other = await park(2)
    assert parent_of(one.pid) == parent_of(other.pid)
    for kind in ("pid", "mnt", "net", "ipc", "uts", "cgroup"):
        places = (one.pid, other.pid, parent_of(one.pid), "self")
        spaces = {os.readlink(f"/proc/{place}/ns/{kind}") for place in places}
        assert len(spaces) == 4, kind
    assert os.readlink(f"/proc/{one.pid}/ns/user") != os.readlink("/proc/self/ns/user")
    mine, others = ({*Path(f"/proc/{sandbox.pid}/cgroup").read_text().splitlines()} for sandbox in (one, other))
    common = {line.split(":")[1] for line in mine & others}
    if any(line.startswith("0::") for line in mine) and len(mine) > 1:
        common -= {""}  # v1 is used
    assert {name for name in common if not name.startswith("name=")} <= {"cpuset", "devices"}
    theirs = [{*descriptors(pid).values()} for sandbox in (one, other) for pid in below(sandbox.pid)]
    box = (parent_of(one.pid), box_of(one.pid))
    parents_own = {name for pid in box for name in descriptors(pid).values()} - {"/dev/null"}
    first, second = ({*theirs[0], *theirs[1], *theirs[2]}, {*theirs[3], *theirs[4], *theirs[5]})
    shared = {name for name in first & second if re.match(r"socket|pipe|anon|pid:|mnt:", name)}
    nameless = {f"anon_inode:[{kind}]" for kind in ("eventfd", "eventpoll", "signalfd")}
    assert shared - nameless == set()
    assert parents_own & (first | second) - nameless == set(), "nothing of the line to the keeper"


async def test_root_inside_is_nobody_outside(many: Any) -> None:
    _, park, _ = many
    (sandbox,) = await park(1)
    for pid in (sandbox.pid, parent_of(sandbox.pid), box_of(sandbox.pid)):
        assert Path(f"/proc/{pid}").stat().st_uid == parent_ids(None).users[0]["hostID"] > 1 << 30
    status = Path(f"/proc/{parent_of(sandbox.pid)}/status").read_text()
    assert int(re.findall(r"CapBnd:\s*(\w+)", status)[0], 16) == sum(1 << n for n in (6, 7, 8, 12, 21))


_LOCKS = """
import fcntl, json, os, sys, time
first = open("/dev/null", "w")
fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
taken = []
second = open("/dev/null", "w")
try:
    fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    taken.append("by this very sandbox")
left = [p for p in ("/tmp/left", "/dev/shm/left", "/workspace/left") if os.path.exists(p)]
for path in ("/tmp/left", "/dev/shm/left"):
    open(path, "w").write("x")
os.environ["LEFT"] = "x"
print(json.dumps({"taken": taken, "left": left, "shown": sorted(p for p in os.listdir("/proc") if p.isdecimal())}))
sys.stdout.flush()
time.sleep(2)
"""


def is_locked(file: IO[str]) -> bool:
    """By this process."""
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


async def test_locks_files_and_processes_of_one_are_not_seen_by_the_next(run: str) -> None:
    with open("/dev/null", "w") as null:
        await eventually(lambda: is_locked(null))  # somebody else's may be in use for a moment
        async with oci_launcher_for(run, start="fork") as launcher:
            async with oci_probed(launcher, _LOCKS) as first, oci_probed(launcher, _LOCKS) as second:
                said = [(await sandbox.exited(), sandbox.last_words)[1] for sandbox in (first, second)]
    assert said == ['{"taken": ["by this very sandbox"], "left": [], "shown": ["1"]}'] * 2


_AS_AGENT = """
import ctypes, json, os, re, signal, sys, time
uid = int(re.search(r"worker-uid (\\d+)", " ".join(sys.argv))[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
libc = ctypes.CDLL(None)
"""
_TAKES_ALL = """
for _ in range(1000):
    libc.inotify_init()
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
for _ in range(200_000):
    libc.sigqueue(os.getpid(), 40, None)
done = open("/dev/zero")
signal.pause()
"""
_NEEDS_SOME = """
timer = ctypes.c_void_p()
print(json.dumps([libc.inotify_init() > 0, libc.timer_create(1, None, ctypes.byref(timer))]))
"""


async def test_one_cannot_use_up_what_the_kernel_counts_per_user(run: str) -> None:
    """All users of a user namespace count for its owner, too: that is not root, and each of them has a share."""
    async with oci_launcher_for(run, start="fork") as launcher:
        async with oci_probed(launcher, _AS_AGENT + _TAKES_ALL) as greedy:
            await eventually(lambda: "/dev/zero" in descriptors(greedy.pid).values())
            own = re.findall(r"SigQ:\s*(\d+)/", Path("/proc/self/status").read_text())
            assert int(own[0]) < 1000, "nor for this machine's root"
            async with oci_probed(launcher, _AS_AGENT + _NEEDS_SOME) as other:
                await other.exited()
    assert other.last_words == "[true, 0]"


# ---------------------------------------------------------------- whoever ends


async def test_no_user_has_the_keys_of_all_siblings(many: Any) -> None:
    """The kernel lets a user have 200, and each sandbox takes one for its session."""
    _, park, _ = many
    (first,) = await park(1)
    siblings = [first, *await park(3)]
    entries = re.findall(r"^ *(\d+):\s+\d+ \d+/\d+ (\d+)/", Path("/proc/key-users").read_text(), re.MULTILINE)
    keys = {int(uid): int(count) for uid, count in entries}
    assert keys.get(Path(f"/proc/{first.pid}").stat().st_uid, 0) < len(siblings)
    assert all(keys[sandbox.uids.runner] for sandbox in siblings)


async def test_no_sandbox_is_told_the_users_of_its_siblings(run: str, many: Any) -> None:
    _, park, _ = many
    (other,) = await park(1)
    told = "import sys\nprint([open('/proc/' + name).read() for name in ('keys', 'key-users')], file=sys.stderr)"
    async with oci_launcher_for(run, start="fork") as launcher:
        async with oci_probed(launcher, told) as sandbox:
            assert re.search(rf"^ *{other.uids.runner}:", Path("/proc/key-users").read_text(), re.MULTILINE)
            await sandbox.exited()
    assert sandbox.last_words == "['', '']"


async def test_the_agents_thread_of_a_parked_sandbox_sleeps(many: Any) -> None:
    """Thousands of parked sandboxes must not take the CPUs from those that work: gRPC would wake it ten times a
    second."""
    _, park, _ = many
    (sandbox,) = await park(1)
    runner, *_ = children(sandbox.pid)

    def wakings() -> int:
        status = Path(f"/proc/{runner}/status").read_text()  # of its first thread
        return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[0])

    await asyncio.sleep(0.5)
    before = wakings()
    await asyncio.sleep(2)
    assert wakings() - before < 5


async def test_a_start_that_is_cancelled_leaves_nothing_whenever_that_is(many: Any) -> None:
    launcher, park, _ = many
    await park(1)
    for delay_s in (0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08):
        starts = [asyncio.create_task(park(1)) for _ in range(3)]
        await asyncio.sleep(delay_s)
        for start in starts:
            start.cancel()
        async with asyncio.timeout(HANG_S / 4):  # one that nobody ended was removed after a minute
            done = await asyncio.gather(*starts, return_exceptions=True)
        there = [each for each in done if not isinstance(each, asyncio.CancelledError)]
        assert all(isinstance(each, list) for each in there), done
        assert len(launcher._live) == 1 + len(there)
        if there:  # this machine had started them by then
            break


@pytest.mark.parametrize(("start", "preload"), [("run", ()), ("fork", ()), ("fork", ("decimal",))])
async def test_a_launcher_that_is_closed_ends_what_it_is_starting_and_leaves_nothing(
    run: str, temporary: Path, start: Any, preload: tuple[str, ...]
) -> None:
    """A parent, then a sandbox, then what a sandbox waits for."""
    spec = a_sandbox(DEFAULT_IMAGE, preload=preload)
    oci_images.stored_image()
    for delay_s in (0.0, 0.02, 0.1, 0.2, 0.3, 0.4, 0.6):
        launcher = OciLauncher(
            run, max_sandboxes=4, start=start, advise=lambda line: None, allow_localhost_tcp=True
        )
        with Channels(run) as channels:
            starts = [asyncio.create_task(parked(launcher, spec, channels, for_s=delay_s)) for _ in range(2)]
            await asyncio.sleep(delay_s)
            async with asyncio.timeout(HANG_S / 8):
                await launcher.aclose()
                done = await asyncio.gather(*starts, return_exceptions=True)
            assert {str(each) for each in done} <= {str(delay_s), "the launcher has been closed"}, done
            assert {type(each) for each in done} <= {LaunchError, SandboxLostError, float}, done
            assert launcher._live == {}
            with pytest.raises(LaunchError, match="the launcher has been closed"):
                await parked(launcher, spec, channels, for_s=0)
        await launcher.aclose()
        assert list(temporary.iterdir()) == []


async def parked(launcher: OciLauncher, spec: SandboxSpec, channels: Channels, for_s: float) -> float:
    async with parked_sandbox(spec, launcher, channels.directory):
        await asyncio.sleep(for_s)
    return for_s


@pytest.mark.parametrize("killed", [parent_of, box_of], ids=["template", "server"])
async def test_with_its_parent_a_sandbox_is_lost_and_the_next_has_another(
    many: Any, killed: Callable[[int], int]
) -> None:
    _, park, _ = many
    one, other = await park(2)
    old = parent_of(one.pid)
    os.kill(killed(one.pid), signal.SIGKILL)
    for sandbox in (one, other):
        async with asyncio.timeout(HANG_S):
            with pytest.raises(SandboxLostError, match="forked from"):
                await sandbox.exited()
    (next_one,) = await park(1)
    assert parent_of(next_one.pid) != old


async def test_a_fork_that_the_kernel_refuses_costs_that_start_alone(many: Any) -> None:
    launcher, park, _ = many
    (first,) = await park(1)
    parent = parent_of(first.pid)
    groups = control_groups(parent, next(iter(launcher._parents.all)))
    (limit, *_) = group_files(groups, "pids", "pids.max", "pids.max")
    before = limit.read_text()
    limit.write_text((limit.parent / "pids.current").read_text())
    with pytest.raises(LaunchError, match="Resource temporarily unavailable"):
        await park(1)
    limit.write_text(before)
    (second,) = await park(1)
    assert parent_of(second.pid) == parent
    assert Path(f"/proc/{first.pid}").exists()


def of_users_of(pid: int, setting: str, value: str = "") -> str:
    """What a file of /proc/sys/user says in that process' user namespace; writes `value` to it then."""
    write = f"; echo {value} > {setting}" if value else ""
    entered = ["nsenter", "--user", f"--target={pid}", "sh", "-ec", f"cd /proc/sys/user; cat {setting}{write}"]
    return subprocess.run(entered, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("kind", ["pid", "net"])
async def test_a_start_without_namespaces_says_what_to_do_and_costs_nothing_else(many: Any, kind: str) -> None:
    _, park, _ = many
    (first,) = await park(1)
    before = of_users_of(parent_of(first.pid), f"max_{kind}_namespaces", "1")
    with pytest.raises(LaunchError, match=r"no more namespaces .*max_pid_namespaces and the like"):
        await park(1)
    of_users_of(parent_of(first.pid), f"max_{kind}_namespaces", before)
    (second,) = await park(1)
    assert parent_of(second.pid) == parent_of(first.pid)
    assert Path(f"/proc/{first.pid}").exists()


async def test_a_keeper_without_descriptors_says_what_to_do_and_loses_nothing(many: Any) -> None:
    _, park, _ = many
    (first,) = await park(1)
    keeper = parent_of(box_of(first.pid))
    before = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
    for free in range(0, 10, 3):
        most = len(descriptors(keeper)) + free
        resource.prlimit(keeper, resource.RLIMIT_NOFILE, (most, before[1]))
        with pytest.raises(LaunchError, match=f"Too many open files .* may have {most}: raise `ulimit -n`"):
            await park(1)
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, before)
    (second,) = await park(1)
    assert parent_of(box_of(second.pid)) == keeper
    assert Path(f"/proc/{first.pid}").exists()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_parent_that_stands_still_costs_a_start_and_its_sandboxes(many: Any) -> None:
    _, park, _ = many
    (first,) = await park(1)
    os.kill(parent_of(first.pid), signal.SIGSTOP)
    with pytest.raises(LaunchError, match="its parent has ended"):
        await park(1)
    with pytest.raises(SandboxLostError, match="forked from"):
        await first.exited()
    assert len(await park(1)) == 1


async def test_what_a_killed_keeper_left_is_removed_by_the_next(many: Any, temporary: Path) -> None:
    _, park, stack = many
    one, other = await park(2)
    os.kill(parent_of(box_of(one.pid)), signal.SIGKILL)
    for sandbox in (one, other):
        async with asyncio.timeout(HANG_S):
            with pytest.raises(SandboxLostError, match="has ended"):
                await sandbox.exited()
    await stack.aclose()
    assert list(temporary.glob(f"{PREFIX}*/state/sandbox-*")) == []


HOARD = "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))"


@pytest.mark.parametrize("start", ["run", "fork"])
async def test_one_short_of_memory_before_anybody_looked_at_it_is_told_so(
    run: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Runtime.start

    async def start_late(self: Runtime, name: str, *given: Any) -> int:
        pid = await started(self, name, *given)
        if name.startswith("sandbox-"):
            await eventually(lambda: not Path(f"/proc/{pid}").exists())
        return pid

    monkeypatch.setattr(Runtime, "start", start_late)
    async with oci_launcher_for(run, start=start) as launcher:
        async with oci_probed(launcher, HOARD, memory_bytes=256 << 20) as sandbox:
            ended = await sandbox.exited()
    assert (ended.exit_code, ended.oom_killed) == (137, True)


async def test_parents_are_renewed_and_the_old_one_ends_with_its_last_child(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "MOST_FORKS", 2)
    async with oci_launcher_for(run, start="fork") as launcher:
        async with oci_probed(launcher, FOREVER) as first:
            old = parent_of(first.pid)
            async with oci_probed(launcher, FOREVER) as second, oci_probed(launcher, FOREVER) as third:
                assert parent_of(second.pid) == old != parent_of(third.pid)
            assert Path(f"/proc/{old}").exists()
        await eventually(lambda: not Path(f"/proc/{old}").exists())


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(3000)])])
async def test_forks_leave_nothing_behind(
    run: str, many: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parents, "MOST_FORKS", 1 << 20)
    monkeypatch.setattr(parents, "MOST_S", 1e9)
    launcher, park, _ = many
    (first,) = await park(1)
    template, parent = parent_of(first.pid), box_of(first.pid)
    keeper = parent_of(parent)

    def state() -> tuple[int, ...]:
        ours = (template, parent, keeper)
        return *(len(descriptors(pid)) for pid in ours), *(mounts_of(pid) for pid in ours)

    before, memory = state(), [resident_bytes(pid) for pid in (parent, template, keeper)]
    names: set[str] = set()
    for _ in range(count // 5):
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(_parked_once(launcher, stack, run) for _ in range(5)))
            names |= {*launcher._live}
    await eventually(lambda: state() == before)
    assert (children(parent), children(template)) == ([template], [first.pid]), "no zombies"
    assert len(names) == count + 1
    assert names & control_groups_of_sandboxes() == {first.name}
    for pid, bytes_before in zip((parent, template, keeper), memory, strict=True):
        assert resident_bytes(pid) < bytes_before + (2 << 20)


def control_groups_of_sandboxes() -> set[str]:
    """Those of other tests go meanwhile."""
    folders = (name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    return {name for name in folders if name.startswith("sandbox-")}


async def _parked_once(launcher: OciLauncher, stack: AsyncExitStack, run: str) -> None:
    channels = stack.enter_context(Channels(run))
    await stack.enter_async_context(parked_sandbox(a_sandbox(DEFAULT_IMAGE), launcher, channels.directory))


def resident_bytes(pid: int) -> int:
    return int(re.findall(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) * 1024


# ---------------------------------------------------------------- what cannot work


RUNS = "import runpy\nrunpy.run_path('/opt/sandbox/app/sandbox/boot/parent.py', run_name='__main__')"


def parents_begin_with(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def beginning(*given: Any, **named: Any) -> Any:
        config = original(*given, **named)
        config["process"]["args"] = [config["process"]["args"][0], "-P", "-c", f"{code}\n{RUNS}"]
        return config

    original = fork_bundles.parent_bundle
    monkeypatch.setattr(fork_bundles, "parent_bundle", beginning)


THREADS = """
import sys, threading, time
import sandbox.boot.imported as ours
imported = ours.imported
wait = lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
ours.imported = lambda **how: (imported(**how), wait())
"""


async def test_a_parent_that_imports_threads_is_refused_by_name(
    run: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    parents_begin_with(THREADS, monkeypatch)
    async with oci_launcher_for(run, start="fork") as launcher:
        with pytest.raises(LaunchError, match="nothing can be forked: what it imports starts 1 threads"):
            async with oci_probed(launcher, FOREVER):
                pytest.fail("it must not be used")
    assert list(temporary.iterdir()) == []


NO_WORKER = """
from sandbox.pid1 import identity
def become_nobody(box):
    raise OSError(1, "not permitted")
identity.become_worker = become_nobody
"""


async def test_a_worker_that_cannot_work_is_a_start_that_failed(
    many: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that a model is told: sandboxes that are not forked find it in their rehearsal."""
    _, park, _ = many
    parents_begin_with(NO_WORKER, monkeypatch)
    with pytest.raises((LaunchError, SandboxLostError), match="worker"):
        await park(1)


NO_LAST_PID = """
import builtins
opened = builtins.open
def open_all_but(name, *how, **named):
    if name == "/proc/sys/kernel/ns_last_pid":
        raise FileNotFoundError(2, "No such file or directory")
    return opened(name, *how, **named)
builtins.open = open_all_but
"""


@pytest.mark.parametrize(("code", "least"), [("", 20_000), (NO_LAST_PID, 300)], ids=["told", "used up"])
async def test_few_processes_have_the_number_of_the_template(
    run: str, monkeypatch: pytest.MonkeyPatch, code: str, least: int
) -> None:
    parents_begin_with(code, monkeypatch)
    async with oci_launcher_for(run, start="fork") as launcher, oci_probed(launcher, FOREVER) as sandbox:
        status = Path(f"/proc/{parent_of(sandbox.pid)}/status").read_text()
        assert int(re.findall(r"NSpid:.*\s(\d+)", status)[0]) > least


async def test_gvisor_is_refused_by_name(run: str) -> None:
    launcher = OciLauncher(run, max_sandboxes=1, start="fork", runtime="runsc")
    with pytest.raises(EnvironmentUnusable, match="gVisor's sandboxes cannot be forked"):
        await launcher.check(a_sandbox(DEFAULT_IMAGE))
    await launcher.aclose()
