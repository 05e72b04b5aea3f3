"""Sandboxes that may write to their root: what an agent can do that is root inside, and where it ends."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import EnvironmentUnusable, LaunchError, SandboxLostError
from orchestrator.launch.auto import BothLaunchers
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_no_forks
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.types import STORAGE_INODES
from tests.fakes import oci_images
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_sandbox, a_writable_sandbox
from tests.fakes.scripted_orchestrator import Script, ScriptedOrchestrator, action
from tests.integration.launch.probes import eventually

_WHY_NOT = oci_images.why_not()
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]

_WHY_NOT_CRUN = oci_images.why_not("crun") if os.geteuid() == 0 else "an ordinary user's crun leaves the flags"
DEADLINE_S = 120.0
MIB = 1 << 20
SH = """
import subprocess
def sh(line):
    done = subprocess.run(line, shell=True, stdout=-1, stderr=-2, stdin=-3, text=True)
    print(done.returncode, done.stdout.strip())
"""
PACKAGE = """
mkdir -p /tmp/p/DEBIAN /tmp/p/usr/local/bin
printf '#!/bin/sh\\necho made\\n' > /tmp/p/usr/local/bin/made; chmod +x /tmp/p/usr/local/bin/made
printf 'Package: made\\nVersion: 1\\nArchitecture: all\\n' > /tmp/p/DEBIAN/control
printf 'Maintainer: a <a@b>\\nDescription: x\\n' >> /tmp/p/DEBIAN/control
dpkg-deb -b /tmp/p /tmp/made.deb && dpkg -i /tmp/made.deb && made
"""
WORKS: dict[str, tuple[str, str]] = {
    "packages": (PACKAGE, "made"),
    "programs in /tmp": ("cp /bin/true /tmp/t && /tmp/t && rm /bin/true && ls /bin/true", "No such file"),
    "owners": ("chown 5:6 /srv && stat -c %u:%g /srv", "0 5:6"),
    "archives": (
        "cd /tmp && mkdir a b && touch a/f && chown 3:4 a/f && tar cp a | tar xp -C b && stat -c %u:%g b/a/f",
        "0 3:4",
    ),
    "other users": ("su -s /bin/sh nobody -c 'id -u; touch /etc/x'", "65534\ntouch: cannot touch '/etc/x'"),
    "whole folders": (
        "rm -r /usr/share && mkdir /usr/share && ls -A /usr/share && mv /var /var2 && ls -d /var2",
        "0 /var2",
    ),
    "kinds of files": (
        "fallocate -l 1M /srv/f && stat -c %s /srv/f && mkfifo /srv/p && ln /srv/f /srv/g",
        "0 1048576",
    ),
    "names": ("hostname; cat /etc/machine-id", f"0 sandbox\n{'0' * 31}1"),
}
SERVERS = """
import socket
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(('localhost', server.getsockname()[1]), timeout=5)
client.sendall(b'over tcp')
print(server.accept()[0].recv(99))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(('0.0.0.0', 0))
datagrams.sendto(b'over udp', ('127.0.0.1', datagrams.getsockname()[1]))
print(datagrams.recv(99))
try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
except OSError as error: print(error.errno)"""


@pytest.fixture(params=["run", "fork"])
async def launcher(
    request: pytest.FixtureRequest, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[OciLauncher]:
    """With a temporary directory of its own."""
    if request.param == "fork" and (why_not := why_no_forks("runc")):
        pytest.skip(why_not)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    oci_images.stored_image()
    launcher = OciLauncher(run, max_sandboxes=3, start=request.param, waived=WAIVED_WITHOUT_ROOT)
    yield launcher
    await launcher.aclose()


async def observed(launcher: OciLauncher, *codes: str, then: Any = None, **changes: Any) -> list[str]:
    """What the agent is told after each step. `then` gets the sandbox when its agent has ended."""
    spec = a_writable_sandbox(DEFAULT_IMAGE, **changes)
    script = Script([*map(action, codes), action("final_answer(1)")], max_steps=len(codes) + 1)
    with Channels("writable", Path("/tmp")) as channels, channels.directory() as channel:
        async with (
            ScriptedOrchestrator(channel, script) as served,
            launcher.launch(spec, channel) as sandbox,
            asyncio.timeout(DEADLINE_S),
        ):
            ended = await sandbox.exited()
            assert ended.exit_code == 0, ended
            if then is not None:
                then(sandbox)
    return served.observations


async def test_root_installs_edits_and_serves(launcher: OciLauncher) -> None:
    told = await observed(launcher, SH, *(f"sh({line!r})" for line, _ in WORKS.values()), SERVERS)
    for (name, (_, expected)), observation in zip(WORKS.items(), told[1:-1], strict=True):
        assert expected in observation, (name, observation)
    assert "b'over tcp'" in told[-1]
    assert "b'over udp'" in told[-1]
    assert "\n97\n" in told[-1]  # EAFNOSUPPORT: what useradd takes for a kernel without auditing


async def test_what_is_written_ends_at_its_size_and_number_of_files(launcher: OciLauncher) -> None:
    fill = (
        "import os\nwith open('/var/big', 'wb', buffering=0) as big:\n    try:\n"
        "        while True: big.write(bytes(1 << 20))\n    except OSError as error: print(error.errno)\n"
        "size = os.stat('/var/big').st_size; os.unlink('/var/big'); print(size >> 20)"
    )
    flood = (
        "n = 0\ntry:\n    while True:\n        open(f'/srv/{n}', 'x').close(); n += 1\n"
        "except OSError as error: print(error.errno, n)"
    )
    told = await observed(launcher, fill, flood, storage_bytes=16 * MIB, storage_inodes=500)
    assert "\n28\n16\n" in told[0]
    number = int(told[1].partition("28 ")[2].split()[0])
    assert 470 <= number < 500


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="needs root and loop devices"
)
async def test_more_storage_than_memory_is_on_disk_and_gone_with_the_sandbox(launcher: OciLauncher) -> None:
    look = (
        "import os\nroom = os.statvfs('/')\nprint('room', room.f_blocks * room.f_frsize >> 20, room.f_files)\n"
        "with open('/srv/big', 'wb', buffering=0) as big:\n    for _ in range(400): big.write(bytes(1 << 20))\n"
        "print('more than memory', os.stat('/srv/big').st_size >> 20)"
    )
    told = await observed(launcher, look, memory_bytes=256 * MIB, storage_bytes=600 * MIB)
    size, inodes = map(int, told[0].partition("room ")[2].split()[:2])
    assert 500 < size <= 600
    assert 80_000 < inodes <= STORAGE_INODES
    assert "more than memory 400" in told[0]
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert [name for name in backing if "orchestrator-" in name] == []


async def test_what_was_written_is_there_until_the_sandbox_is_removed(launcher: OciLauncher) -> None:
    seen: list[dict[str, list[str]]] = []
    sandboxes: list[OciSandbox] = []

    def look(sandbox: OciSandbox) -> None:
        with sandbox.written() as folder:
            seen.append(
                {name: sorted(os.listdir(f"/proc/self/fd/{folder}/{name}")) for name in os.listdir(folder)}
            )
            if "etc" in seen[-1]:
                assert stat.S_ISCHR(os.stat("etc/issue", dir_fd=folder, follow_symlinks=False).st_mode)
        sandboxes.append(sandbox)

    await observed(launcher, "1 + 1", then=look)
    await observed(launcher, "import os\nopen('/srv/new', 'w').write('x')\nos.unlink('/etc/issue')", then=look)
    assert seen == [{}, {"srv": ["new"], "etc": ["issue"]}]  # what a sandbox is given shows in no difference
    with pytest.raises(SandboxLostError, match="is gone"), sandboxes[-1].written():
        pytest.fail("it was removed")


HIDE = """
import os
text, status = open('/etc/issue').read(), os.stat('/etc/issue')
open('/etc/issue', 'r+').write(text[::-1])
os.utime('/etc/issue', ns=(status.st_atime_ns, status.st_mtime_ns))
os.rename('/etc/group', '/srv/moved')
os.makedirs('/srv/closed/in'); open('/srv/closed/in/file', 'x').close(); os.chmod('/srv/closed', 0)
open('/srv/.wh.passwd', 'x').close(); os.mkfifo('/srv/pipe'); os.symlink('/etc/shadow', '/srv/out')
for attempt in ("os.mknod('/srv/passwd', 0o020000, 0)", "os.setxattr('/etc', 'trusted.overlay.opaque', b'y')"):
    try: print('made', exec(attempt))
    except OSError: pass
open('/srv/written', 'x').close()
if os.fork() == 0:
    os.setsid()
    while True: open('/srv/written', 'a').write('more')
os.chown('/', 1, 1), os.chmod('/', 0)
print('hidden')
"""


async def test_no_change_is_hidden_and_nothing_is_changed_any_more(launcher: OciLauncher) -> None:
    script = Script([action(HIDE), action("while True: open('/srv/written', 'a').write('more')")])
    with Channels("writable", Path("/tmp")) as channels, channels.directory() as channel:
        async with (
            ScriptedOrchestrator(channel, script) as served,
            launcher.launch(a_writable_sandbox(DEFAULT_IMAGE), channel) as sandbox,
            asyncio.timeout(DEADLINE_S),
        ):
            await eventually(lambda: len(served.completions) > 1)
            told = await sandbox.changes()
            assert sandbox.upper is not None
            assert told is not None
            assert told == await sandbox.changes()
            assert Path(sandbox.upper, "srv", "written").stat().st_size == told.changes[-1].size_bytes
    assert "hidden" in served.observations[0]
    assert "made" not in served.observations[0]
    found = {change.path: change for change in told.changes}
    assert found["/etc/issue"].kind == "changed"
    assert found["/etc/issue"].diff
    assert [path for path, change in found.items() if change.kind == "removed"] == ["/etc/group"]
    assert {"/srv/moved", "/srv/closed/", "/srv/written"} <= {*found}
    inside = {} if "/srv/closed/in/file" in found else {"unreadable": 1}  # an ordinary user may not look there
    assert told.left_out == {"name": 1, "pipe": 1, "link": 1, **inside}
    assert bool(inside) == (os.geteuid() != 0)


LEAVE = """
import os, socket
for place in ('/tmp', '/var/tmp', '/workspace', '/dev/shm', '/etc', '/opt', '/run', '/root', '/'):
    open(f'{place}/left', 'w').write('left')
for name in ('/etc/passwd', '/bin/sh', '/etc/ld.so.preload'):
    open(name, 'a').write('left')
held = [socket.socket(socket.AF_UNIX), socket.create_server(('127.0.0.1', 7777))]
held[0].bind('\\0left')
held[0].listen()
if os.fork() == 0:
    os.setsid()
    while True: __import__('time').sleep(1)
os.chmod('/usr', 0)
print('left')
"""
LOOK = """
import os, socket
found = [p for p in ('/tmp', '/var/tmp', '/workspace', '/dev/shm', '/etc', '/opt', '/run', '/root', '/')
         if os.path.exists(f'{p}/left')]
found += [n for n in ('/etc/passwd', '/bin/sh') if open(n, 'rb').read().endswith(b'left')]
for family, address in ((socket.AF_UNIX, '\\0left'), (socket.AF_INET, ('127.0.0.1', 7777))):
    try: found.append(socket.socket(family).connect(address))
    except OSError: pass
processes = [p for p in os.listdir('/proc') if p.isdecimal()]
print('found', found, len(processes), os.path.exists('/etc/ld.so.preload'), oct(os.stat('/usr').st_mode))
"""


async def test_neither_a_neighbour_nor_the_next_one_finds_what_one_left(launcher: OciLauncher) -> None:
    spec, clean = a_writable_sandbox(DEFAULT_IMAGE), "found [] 3 False 0o40755"
    script = Script([action(LEAVE), action("while True: pass")], step_timeout_s=DEADLINE_S)
    with Channels("writable", Path("/tmp")) as channels, channels.directory() as channel:
        async with ScriptedOrchestrator(channel, script) as served, launcher.launch(spec, channel):
            await eventually(lambda: len(served.completions) > 1)
            assert "\nleft\n" in served.observations[0]
            assert clean in (await observed(launcher, LOOK))[0]
    assert clean in (await observed(launcher, LOOK))[0]


async def test_two_sandboxes_share_no_id_and_have_the_same_addresses(launcher: OciLauncher) -> None:
    look = "def made(): pass\nprint('ids', open('/proc/self/uid_map').read().split()[1], made)"
    told = [(await observed(launcher, look))[0].partition("ids ")[2].splitlines()[0] for _ in range(2)]
    ids, addresses = zip(*(line.split(" ", 1) for line in told), strict=True)
    assert "function made at 0x" in addresses[0]
    assert addresses[0] == addresses[1]
    assert (ids[0] != ids[1]) == (os.geteuid() == 0)  # an ordinary user has one range: id_ranges


async def test_layers_lie_over_the_image_top_first(launcher: OciLauncher, tmp_path: Path) -> None:
    for name, files in {"top": ("both", "top"), "under": ("both", "under")}.items():
        (tmp_path / name / "srv").mkdir(parents=True)
        for file in files:
            (tmp_path / name / "srv" / file).write_text(name)
    look = "import os\nprint(sorted(os.listdir('/srv')), open('/srv/both').read(), os.stat('/srv/both').st_uid)"
    told = await observed(launcher, look, layers=(str(tmp_path / "top"), str(tmp_path / "under")))
    assert "['both', 'top', 'under'] top 0" in told[0]
    assert (tmp_path / "top" / "srv" / "both").read_text() == "top"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["/nowhere", "/", "/proc", "opt", None])
async def test_a_layer_that_leads_our_mounts_elsewhere_costs_its_sandbox_alone(
    launcher: OciLauncher, tmp_path: Path, target: str | None
) -> None:
    (layer := tmp_path / "layer").mkdir()
    (layer / "opt").write_text("") if target is None else (layer / "opt").symlink_to(target)
    with pytest.raises(LaunchError, match="/opt/sandbox is or lies behind a link or a file"):
        await observed(launcher, "1", layers=(str(layer),))
    assert "\n2\n" in (await observed(launcher, "print(1 + 1)"))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("user", "ids"), [("nobody", "65534 65534"), ("65534:5", "65534 5"), ("0", "0 0"), (None, "0 0"), ("7", "7 7")]
)
async def test_the_agent_is_whom_the_task_names(launcher: OciLauncher, user: str | None, ids: str) -> None:
    look = "import os\nprint(os.getuid(), os.getgid(), os.getcwd())\nopen('here', 'w').write('x')\nprint('own')"
    told = await observed(launcher, look, user=user)
    assert f"{ids} /workspace\nown" in told[0]


async def test_a_user_that_is_not_in_the_image_is_named(launcher: OciLauncher) -> None:
    spec = a_writable_sandbox(DEFAULT_IMAGE, user="ghost")
    with pytest.raises(EnvironmentUnusable, match="no user 'ghost'"):
        await launcher.check(spec)
    with pytest.raises(LaunchError, match="no user 'ghost'"):
        async with launcher.launch(spec, Path("/nowhere")):
            pytest.fail("it must not be used")


async def test_a_root_that_cannot_be_made_is_one_line_and_leaves_nothing(
    launcher: OciLauncher, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=r"no writable root: .*/no/such/layer") as refused:
        await observed(launcher, "1", layers=("/no/such/layer",))
    assert "\n" not in str(refused.value)
    assert [*tmp_path.glob("orchestrator-*/bundles/sandbox-*")] == []
    assert "\n2\n" in (await observed(launcher, "print(1 + 1)"))[0]


async def test_nothing_is_mounted_for_others_and_nothing_stays(launcher: OciLauncher, tmp_path: Path) -> None:
    mounts: list[list[str]] = []

    def look(sandbox: OciSandbox) -> None:
        assert sandbox.upper is not None
        keeper = Path(*sandbox.upper.parts[:3])
        mounts.extend(mounted(place, tmp_path) for place in (keeper, Path("/proc/self")))
        sandboxes.append(keeper)

    sandboxes: list[Path] = []
    await observed(launcher, "1", then=look)
    assert len(mounts[0]) == 2  # what was written, and the overlay
    assert mounts[1] == []
    assert mounted(sandboxes[0], tmp_path) == []


def mounted(process: Path, below: Path) -> list[str]:
    """Of sandboxes: a keeper has a place of its own where parents find theirs (`shared`)."""
    places = [line.split()[4] for line in (process / "mountinfo").read_text().splitlines()]
    return [place for place in places if place.startswith(str(below)) and Path(place).name != "shared"]


async def test_docker_refuses_it_by_name_and_auto_takes_the_oci_runtime(
    launcher: OciLauncher, run: str, tmp_path: Path
) -> None:
    docker = DockerLauncher(run, max_sandboxes=1)
    both = BothLaunchers(docker, launcher, "runc", WAIVED_WITHOUT_ROOT)
    spec = a_writable_sandbox(DEFAULT_IMAGE)
    try:
        with pytest.raises(EnvironmentUnusable, match=r"needs --env\.launcher oci"):
            await docker.check(spec)
        with pytest.raises(LaunchError, match=r"needs --env\.launcher oci"):
            async with docker.launch(spec, tmp_path):
                pytest.fail("it must not be used")
        await both.check(spec)
        assert "docker" not in await both.describe(spec)
        assert "docker" in await both.describe(a_sandbox(DEFAULT_IMAGE))
    finally:
        await docker.aclose()


async def test_auto_without_a_runtime_says_what_is_missing(run: str) -> None:
    docker = DockerLauncher(run, max_sandboxes=1)
    oci = OciLauncher(run, max_sandboxes=1)
    both = BothLaunchers(docker, oci, "no-such-runtime", WAIVED_WITHOUT_ROOT)
    with pytest.raises(EnvironmentUnusable, match=r"needs --env\.launcher oci, which .*no-such"):
        await both.check(a_writable_sandbox(DEFAULT_IMAGE))
    await both.aclose()


@pytest.mark.skipif(_WHY_NOT_CRUN is not None, reason=_WHY_NOT_CRUN or "")
async def test_crun_takes_flags_off_the_root_and_is_refused(run: str) -> None:
    oci_images.stored_image()
    crun = OciLauncher(run, max_sandboxes=1, runtime="crun")
    with Channels("crun", Path("/tmp")) as channels, channels.directory() as channel:
        with pytest.raises(EnvironmentUnusable, match=r"without nosuid and nodev, as crun makes it .*: use runc"):
            async with crun.launch(a_writable_sandbox(DEFAULT_IMAGE), channel):
                pytest.fail("it must not be used")
    await crun.aclose()


async def test_gvisor_is_refused(run: str, tmp_path: Path) -> None:
    (program := tmp_path / "runsc").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    oci = OciLauncher(run, max_sandboxes=1, runtime=str(program), waived=WAIVED_WITHOUT_ROOT)
    oci_images.stored_image()
    with pytest.raises(LaunchError, match="needs runc"):
        async with oci.launch(a_writable_sandbox(DEFAULT_IMAGE), Path("/nowhere")):
            pytest.fail("it must not be used")
    await oci.aclose()
