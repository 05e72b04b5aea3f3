"""The confinement as a program inside a real container meets it, as pid 1 and as the code worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.launch.oci.machine import why_no_forks
from tests.fakes import oci_images
from tests.integration.launch.probes import answer_of, answer_without_engine, launcher_for

pytestmark = pytest.mark.docker

PREAMBLE = """
import ctypes, errno, json, os, socket, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def refused(call, *arguments):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno()) if libc.syscall(call, *arguments) < 0 else None
def attempt(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return None
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
RUNNER, WORKER = int(arguments["--runner-uid"]), int(arguments["--worker-uid"])
def become(uid):
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
"""


Look = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["docker", "oci", "oci-fork"])
def look(request: pytest.FixtureRequest, run: str) -> Look:
    """What a program in a sandbox of each launcher prints as JSON. Options are the launcher's."""
    if request.param != "docker":
        if (reason := oci_images.why_not()) is not None:
            pytest.skip(reason)
        if request.param == "oci-fork" and (reason := why_no_forks("runc")) is not None:
            pytest.skip(reason)

        async def look_without_engine(program: str, **options: Any) -> Any:
            start = "fork" if request.param == "oci-fork" else "run"
            return await answer_without_engine(run, PREAMBLE + program, start=start, **options)

        return look_without_engine
    engine, probe = request.getfixturevalue("engine"), request.getfixturevalue("probe")

    async def look_by_engine(program: str, **options: Any) -> Any:
        async with launcher_for(run, **options) as launcher:
            return await answer_of(engine, launcher, probe, PREAMBLE + program)

    return look_by_engine


async def test_pid_1_has_two_capabilities_a_filter_and_a_sealed_root(look: Look) -> None:
    seen = await look(
        """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "bounding": int(status["CapBnd"], 16),
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "seccomp": status["Seccomp"].strip(),
    "pid": os.getpid(),
    "interfaces": [line.partition(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
    "routes": len(open("/proc/net/route").readlines()) - 1,
    "names": [name for p in ("/etc/hosts", "/etc/resolv.conf") if os.path.exists(p)
              for name in open(p).read().split()
              if not name.startswith(("ip6-", "ff02:", "127.0.0.1", "::1", "localhost"))],
    "written": [p for p in ("/x", "/etc/x", "/etc/hosts", "/var/x", "/opt/sandbox/x", "/run/channel/box/x",
                            "/proc/sys/kernel/hostname", "/sys/x")
                if attempt(lambda: open(p, "a").write("x")) is None],
    "host_name": os.uname().nodename,
    "cmdline": open("/proc/cmdline").read(),
    "environment": sorted(set(os.environ) - {"HOSTNAME"}),
    "own_group": sum(not line.endswith(":/") for line in open("/proc/self/cgroup").read().splitlines()),
}))
""",
    )
    assert seen == {
        "bounding": 0xC0,
        "no_new_privileges": "1",
        "seccomp": "2",
        "pid": 1,
        "interfaces": ["lo"],
        "routes": 0,
        "names": [],
        "written": [],
        "host_name": "sandbox",
        "cmdline": "",
        "environment": sorted(
            ["HOME", "LANG", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPATH", "TZ"]
        ),
        "own_group": 0,
    }


async def test_dangerous_system_calls_are_refused_even_to_pid_1(look: Look) -> None:
    seen = await look(
        """
import platform
X86 = platform.machine() == "x86_64"
numbers = {
    "io_uring_setup": 425, "pidfd_getfd": 438, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "mount_setattr": 442, "process_madvise": 440,
    **({"ptrace": 101, "userfaultfd": 323, "unshare": 272, "setns": 308, "bpf": 321, "keyctl": 250,
        "add_key": 248, "request_key": 249, "perf_event_open": 298, "kcmp": 312, "process_vm_readv": 310,
        "process_vm_writev": 311, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "io_setup": 206, "memfd_secret": 447, "seccomp": 317, "personality_no_aslr": 135} if X86 else {}),
}
CLONE_NEWUSER = 0x10000000
result = {name: refused(number, 0x0040000, 0, 0, 0, 0, 0) for name, number in numbers.items()}
result["clone_newuser"] = refused(56 if X86 else 220, CLONE_NEWUSER | 17, 0, 0, 0, 0)
result["clone3"] = refused(435, 0, 0)
print(json.dumps(result))
""",
    )
    assert seen.pop("clone3") == "ENOSYS"
    assert len(seen) >= 8
    assert set(seen.values()) == {"EPERM"}, seen


SOCKETS = """
kinds = {"tcp": (2, 1), "tcp6": (10, 1), "udp": (2, 2), "raw": (2, 3), "netlink": (16, 3), "packet": (17, 3),
         "alg": (38, 5), "vsock": (40, 1), "bluetooth": (31, 1), "unix": (1, 1)}
result = {name: attempt(lambda: socket.socket(*kind).close()) for name, kind in kinds.items()}
result["pair"] = attempt(lambda: [s.close() for s in socket.socketpair()])
"""


async def test_only_unix_sockets_can_be_made(look: Look) -> None:
    seen = await look(SOCKETS + "print(json.dumps(result))")
    assert [name for name, error in seen.items() if error is None] == ["unix", "pair"]
    assert {error for error in seen.values() if error} == {"EPERM"}


async def test_localhost_tcp_can_be_allowed_and_leads_nowhere_else(look: Look) -> None:
    seen = await look(
        SOCKETS
        + """
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(("localhost", server.getsockname()[1]), timeout=5)
client.sendall(b"hello"); accepted = server.accept()[0]
result["echo"] = accepted.recv(5).decode()
result["away"] = attempt(lambda: socket.create_connection(("192.0.2.1", 80), timeout=5))
result["metadata"] = attempt(lambda: socket.create_connection(("169.254.169.254", 80), timeout=5))
print(json.dumps(result))
""",
        allow_localhost_tcp=True,
    )
    assert seen["echo"] == "hello"
    assert (seen["tcp"], seen["udp"], seen["raw"], seen["vsock"]) == (None, "EPERM", "EPERM", "EPERM")
    assert (seen["away"], seen["metadata"]) == ("ENETUNREACH", "ENETUNREACH")


async def test_python_works_as_usual_within_it(look: Look) -> None:
    seen = await look(
        """
import asyncio, concurrent.futures, mmap, multiprocessing, select, shutil, signal, tempfile
become(WORKER)
os.chdir("/workspace"); os.environ["HOME"] = "/workspace"
def square(x):
    return x * x
async def spawn():
    process = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    return (await process.communicate(b"asyncio"))[0].decode()
result = {}
thread = threading.Thread(target=result.setdefault, args=("thread", True)); thread.start(); thread.join()
result["subprocess"] = subprocess.run(["sh", "-c", "echo $((6*7))"], capture_output=True, text=True).stdout
result["asyncio"] = asyncio.run(spawn())
with multiprocessing.get_context("fork").Pool(2) as pool:
    result["pool"] = pool.map(square, [1, 2, 3])
with multiprocessing.Lock():
    result["lock"] = True
with concurrent.futures.ThreadPoolExecutor() as threads:
    result["threads"] = list(threads.map(square, [4]))
open("a", "w").write("text"); shutil.copy2("a", "b"); os.mkfifo("f"); os.symlink("a", "l"); os.rename("b", "c")
result["files"] = sorted(os.listdir())
result["temporary"] = tempfile.NamedTemporaryFile().name.startswith("/tmp/")
mmap.mmap(-1, 4096).write(b"x")
signal.setitimer(signal.ITIMER_REAL, 10); signal.setitimer(signal.ITIMER_REAL, 0)
left, right = socket.socketpair(); left.send(b"pair"); result["pair"] = right.recv(4).decode()
import grpc, smolagents
from multiprocessing.shared_memory import SharedMemory
shared = SharedMemory(create=True, size=1000)
result["shared_memory"] = len(shared.buf) >= 1000
shared.close(); shared.unlink()
print(json.dumps(result))
""",
    )
    assert seen == {
        "thread": True,
        "subprocess": "42\n",
        "asyncio": "asyncio",
        "pool": [1, 4, 9],
        "lock": True,
        "threads": [16],
        "files": ["a", "c", "f", "l"],
        "temporary": True,
        "pair": "pair",
        "shared_memory": True,
    }


async def test_writable_places_end_at_their_size_and_number_of_files(look: Look) -> None:
    seen = await look(
        """
become(WORKER)
def fill(path):
    block = bytes(1 << 20)
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(block)
def flood(place):
    for number in range(100_000):
        open(f"{place}/{number}", "x").close()
result = {}
for place in ("/workspace", "/tmp", "/dev/shm"):
    total = os.statvfs(place)
    result[place] = [total.f_blocks * total.f_frsize, total.f_files, attempt(fill, place + "/big")]
    os.truncate(place + "/big", 0)
    result[place].append(attempt(flood, place))
result["attachments"] = [attempt(open, "/attachments/x", "w"), os.stat("/attachments").st_uid == RUNNER]
places = ("/", "/dev", "/run", "/run/lock", "/var/tmp", "/dev/mqueue", "/sys/fs/cgroup", "/proc/self")
result["elsewhere"] = [place for place in places if attempt(open, place + "/x", "w") is None]
os.chdir("/workspace")
import shutil
for number in range(8192):
    os.path.exists(str(number)) and os.unlink(str(number))
shutil.copy("/bin/true", "/workspace/t")
result["executed"] = attempt(subprocess.run, ["/workspace/t"])
print(json.dumps(result))
""",
    )
    for place in ("/workspace", "/tmp", "/dev/shm"):
        size, files, full, flooded = seen[place]
        assert 0 < size < 1 << 30
        assert 0 < files <= 8192
        assert (full, flooded) == ("ENOSPC", "ENOSPC"), place
    assert seen["attachments"] == ["EACCES", True]
    assert seen["elsewhere"] == []
    assert seen["executed"] == "EACCES"


async def test_worker_reaches_neither_socket_nor_other_identities(look: Look) -> None:
    seen = await look(
        """
import signal
runner = os.fork()
if runner == 0:
    become(RUNNER); signal.pause()
worker = os.fork()
if worker > 0:
    os.waitpid(worker, 0); os._exit(0)
become(WORKER)
print(json.dumps({
    "channel": attempt(os.listdir, "/run/channel"),
    "socket": attempt(socket.socket(socket.AF_UNIX).connect, "/run/channel/box/s"),
    "kill": [attempt(os.kill, pid, 9) for pid in (1, runner)],
    "memory": [attempt(open, f"/proc/{pid}/mem", "rb") for pid in (1, runner)],
    "environ": [attempt(lambda: open(f"/proc/{pid}/environ").read()) for pid in (1, runner)],
    "root": attempt(os.setuid, 0),
    "device": attempt(os.mknod, "/workspace/d", 0o020666, os.makedev(1, 1)),
}))
""",
    )
    assert seen["channel"] == "EACCES"
    assert seen["socket"] == "EACCES"
    assert seen["kill"] == ["EPERM", "EPERM"]
    assert set(seen["memory"]) <= {"EACCES", "EPERM"}
    assert set(seen["environ"]) <= {"EACCES", "EPERM"}
    assert seen["root"] == "EPERM"
    assert seen["device"] == "EPERM"


async def test_limits_of_processes_files_and_cores_hold(look: Look) -> None:
    seen = await look(
        """
import resource, time
children = []
def bomb():
    while True:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        children.append(pid)
forks = attempt(bomb)
for pid in children:
    os.kill(pid, 9); os.waitpid(pid, 0)
files = []
opened = attempt(lambda: [files.append(open("/dev/null")) for _ in range(5000)])
count = len(files)
files.clear()
print(json.dumps({
    "forks": [forks, len(children)],
    "files": [opened, count],
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "score": int(open("/proc/self/oom_score_adj").read()),
}))
""",
    )
    assert seen["forks"][0] == "EAGAIN"
    assert seen["forks"][1] < 128
    assert seen["files"][0] == "EMFILE"
    assert seen["files"][1] < 1024
    assert seen["core"] == [0, 0]
    assert seen["score"] > 0
