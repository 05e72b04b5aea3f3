"""What is particular to sandboxes without an Engine: who watches them, how they ended, what is left by whom."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError, EnvironmentUnusable, LaunchError, SandboxLostError
from orchestrator.launch.channels import PREFIX
from orchestrator.launch.control_groups import CGROUPS, control_groups, group_files
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci import launcher as oci_launcher
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.leftovers import remember, remove_containers
from orchestrator.launch.oci.machine import runtime_version, why_no_forks
from orchestrator.launch.oci.namespaces import Namespaces
from orchestrator.launch.oci.program import find_oci_runtime
from orchestrator.launch.reaper import reap_directories
from tests.fakes import oci_images
from tests.fakes.plans import a_sandbox
from tests.integration.launch.probes import MIB, OPTIONS, eventually, oci_launcher_for, oci_probed

_WHY_NOT = oci_images.why_not()
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]

FOREVER = "import signal\nsignal.pause()"
HANG_S = 120.0
WRITABLE = {"root": "writable", "storage_bytes": 16 * MIB, "storage_inodes": 1000}
VICTIM = """
import asyncio, json, os, sys
from tests.fakes.plans import WAIVED_WITHOUT_ROOT
from tests.integration.launch.probes import oci_launcher_for, oci_probed
async def main():
    async with oci_launcher_for("victim", waived=WAIVED_WITHOUT_ROOT, start=os.environ["START"]) as launcher:
        async with oci_probed(launcher, "import signal\\nsignal.pause()", **json.loads(sys.argv[1])) as one:
            print(one.sandbox_id, one.pid, flush=True)
            await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this test."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)


@pytest.fixture(autouse=True)
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the launchers of this test start sandboxes."""
    if getattr(request, "param", "run") == "fork" and (reason := why_no_forks("runc")) is not None:
        pytest.skip(reason)
    monkeypatch.setitem(OPTIONS, "start", getattr(request, "param", "run"))
    monkeypatch.setenv("START", OPTIONS["start"])


BOTH = pytest.mark.parametrize("start", ["run", "fork"], indirect=True)


def keeper_of(pid: int) -> int:
    """The process id of the keeper that this process has started for the container with pid 1 `pid`, or for the
    parent that it was forked from."""
    while b"keeper.py" not in Path("/proc", str(pid), "cmdline").read_bytes():
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def control_groups_of(name: str) -> list[str]:
    """The folders of a container's, in all hierarchies."""
    return [folder for folder, _, _ in os.walk(CGROUPS) if name in folder]


def is_gone(pid: int) -> bool:
    """Or dead and not waited for yet by the process that got it."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# ---------------------------------------------------------------- how they end


@BOTH
async def test_exit_code_and_last_words_are_told(run: str) -> None:
    async with oci_launcher_for(run) as launcher:
        async with oci_probed(launcher, "import sys; sys.exit('no \\x1b[31mluck')") as sandbox:
            ended = await sandbox.exited()
            assert (ended.exit_code, ended.oom_killed) == (1, False)
            assert ended.reason == "exit code 1: no ?[31mluck"
        async with oci_probed(launcher, "print('done')") as sandbox:
            assert (await sandbox.exited()).reason == "exit code 0"
            assert sandbox.last_words == "done"


@BOTH
async def test_a_flood_of_output_neither_stops_the_sandbox_nor_is_kept(run: str) -> None:
    program = "import os\nfor _ in range(500): os.write(2, b'x' * 100_000)\nprint('end')"
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, program) as sandbox:
        async with asyncio.timeout(HANG_S):
            assert (await sandbox.exited()).exit_code == 0
        assert sandbox.last_words.endswith("end")
        assert len(sandbox.last_words) <= 4000


@BOTH
async def test_pid_1_killed_for_memory_is_told(run: str) -> None:
    program = "hoard = []\nwhile True: hoard.append(bytes(b'x' * (16 << 20)))"
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, program, memory_bytes=256 * MIB) as sandbox:
        async with asyncio.timeout(HANG_S):
            ended = await sandbox.exited()
        assert (ended.exit_code, ended.oom_killed) == (137, True)


@pytest.mark.slow
@BOTH
async def test_cpu_time_grows_with_work_and_is_known_after_the_end(run: str) -> None:
    program = "import time\nwhile time.process_time() < 0.5: pass"
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, program) as sandbox:
        async with asyncio.timeout(HANG_S):
            await sandbox.exited()
        assert (await sandbox.cpu_s() or 0) >= 0.5


@BOTH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_sandbox_that_somebody_else_ends_is_lost(run: str, number: int) -> None:
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, _IDLE_PID_1) as sandbox:
        # For some milliseconds it may still be the runtime's own process, which ends with 2.
        await eventually(lambda: Path(f"/proc/{sandbox.pid}/comm").read_text() == "python\n")
        end = asyncio.ensure_future(sandbox.exited())
        async with asyncio.timeout(HANG_S):
            while not end.done():
                os.kill(sandbox.pid, number)
                await asyncio.wait([end], timeout=0.1)
        with pytest.raises(SandboxLostError, match="somebody else"):
            await end


@BOTH
async def test_a_killed_sandbox_is_the_codes_own_doing(run: str) -> None:
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, FOREVER) as sandbox:
        os.kill(sandbox.pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            assert ((await sandbox.exited()).exit_code, (await sandbox.exited()).oom_killed) == (137, False)


# As our own pid 1. Before it handles a signal, it does not get it.
_IDLE_PID_1 = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os._exit(128 + number))
while True:
    time.sleep(0.05)
"""


@BOTH
async def test_control_groups_and_bundles_go_with_their_sandbox(run: str, temporary: Path) -> None:
    async with oci_launcher_for(run) as launcher:
        async with oci_probed(launcher, FOREVER) as sandbox:
            groups = control_groups(sandbox.pid, sandbox.sandbox_id)
            (file, *_) = group_files(groups, "pids", "pids.max", "pids.max")
            assert file.is_relative_to(CGROUPS)
            assert len(list(temporary.glob(f"{PREFIX}*/bundles/sandbox-*"))) == 1
        assert control_groups_of(sandbox.sandbox_id) == []
        assert list(temporary.glob(f"{PREFIX}*/bundles/sandbox-*")) == []
        assert list(temporary.glob(f"{PREFIX}*/state/sandbox-*")) == []
    assert list(temporary.iterdir()) == []


@BOTH
async def test_a_sandbox_weaker_than_asked_is_refused_by_name_and_removed(
    run: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weak(*arguments: Any, **options: Any) -> dict[str, Any]:
        config = original(*arguments, **options)
        del config["linux"]["seccomp"]
        config["linux"]["resources"]["pids"]["limit"] = 4096
        return config

    original = oci_launcher.bundle
    monkeypatch.setattr(oci_launcher, "bundle", weak)
    async with oci_launcher_for(run) as launcher:
        with pytest.raises(EnvironmentUnusable, match=r"seccomp .*pids is 4096 instead of 128"):
            async with oci_probed(launcher, FOREVER):
                pytest.fail("it must not be used")
        assert list(temporary.glob(f"{PREFIX}*/state/sandbox-*")) == []
    waived = frozenset({"seccomp", "pids"})
    async with oci_launcher_for(run, waived=waived) as launcher, oci_probed(launcher, FOREVER) as sandbox:
        assert sandbox.sandbox_id


# ---------------------------------------------------------------- whoever is killed


@BOTH
async def test_without_its_keeper_a_sandbox_is_lost_and_the_next_ones_have_another(run: str) -> None:
    async with oci_launcher_for(run) as launcher:
        async with oci_probed(launcher, FOREVER) as sandbox:
            pid = sandbox.pid
            os.kill(keeper_of(pid), signal.SIGKILL)
            async with asyncio.timeout(HANG_S):
                with pytest.raises(SandboxLostError, match="watches"):
                    await sandbox.exited()
        assert is_gone(pid)
        async with oci_probed(launcher, "print('again')") as sandbox:
            assert (await sandbox.exited()).exit_code == 0


@BOTH
async def test_a_keeper_leaves_ctrl_c_and_sigterm_to_the_orchestrator(run: str) -> None:
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, FOREVER) as sandbox:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(keeper_of(sandbox.pid), number)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.exited()


@BOTH
@pytest.mark.parametrize(
    "changes", [{}, pytest.param(WRITABLE, marks=pytest.mark.slow)], ids=["read-only", "writable"]
)
@pytest.mark.parametrize("keeper_too", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_killed_orchestrator_leaves_nothing(
    temporary: Path, keeper_too: bool, changes: dict[str, object]
) -> None:
    environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join((".", "proto"))}
    command = [sys.executable, "-c", VICTIM, json.dumps(changes)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True)
    assert victim.stdout is not None
    name, pid = (await asyncio.to_thread(victim.stdout.readline)).split()
    keeper = keeper_of(int(pid))
    assert reap_directories().containers == 0, "it still lives"
    if keeper_too:
        os.kill(victim.pid, signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)
    victim.kill()
    victim.wait()
    if keeper_too and OPTIONS["start"] == "run":  # the probe is no sandbox: nothing ties it to its orchestrator
        assert not is_gone(int(pid))
    elif not keeper_too:
        await eventually(lambda: is_gone(keeper))
    reaped = await asyncio.to_thread(reap_directories)
    parents = OPTIONS["start"] == "fork"
    assert reaped.containers == keeper_too * (1 + parents)
    await eventually(lambda: is_gone(int(pid)))
    assert list(temporary.iterdir()) == []
    assert not [group for group in control_group_folders() if group.name == name]


def test_what_a_runtime_keeps_for_itself_is_no_container(tmp_path: Path) -> None:
    """crun has its compiled filters beside what it remembers of containers."""
    remember(tmp_path, find_oci_runtime("runc"))
    (tmp_path / "state" / ".cache").mkdir(parents=True)
    assert remove_containers(tmp_path) == (0, 0)


def control_group_folders() -> Iterator[Path]:
    for folder, _, _ in os.walk(CGROUPS):
        yield Path(folder)


# ---------------------------------------------------------------- what cannot work


async def test_a_good_machine_passes_and_is_described(run: str) -> None:
    oci_images.stored_image()
    launcher = OciLauncher(run, max_sandboxes=1, advise=lambda line: None)
    spec = a_sandbox(DEFAULT_IMAGE)
    await launcher.check(spec)
    await launcher.ready(spec)
    told = await launcher.describe(spec)
    await launcher.aclose()
    assert told["runtime"] == runtime_version(find_oci_runtime("runc"))
    assert re.match(r"(runc|crun) version \d", told["runtime"])
    assert told["image_id"] == f"sha256:{oci_images.stored_image().digest}"


@pytest.mark.parametrize(
    ("options", "limits", "cure"),
    [
        ({"runtime": "no-such-runtime"}, {}, "install runc"),
        ({}, {"image": "no-such-image:1"}, "orchestrator image build --oci"),
        ({}, {"image": "/no/such/file.tar"}, "No such file"),
        ({}, {"memory_bytes": 1 << 50}, "--env.sandbox_memory"),
        ({}, {"cpus": 1000.0}, "--env.sandbox_cpus"),
        ({"runtime": "/bin/false"}, {}, "does not start"),
    ],
)
async def test_what_cannot_work_is_said_in_one_line_before_anything_starts(
    run: str, options: dict[str, Any], limits: dict[str, Any], cure: str
) -> None:
    launcher = OciLauncher(run, max_sandboxes=1, **options)
    with pytest.raises(EnvironmentUnusable) as refused:
        await launcher.check(a_sandbox(**{"image": DEFAULT_IMAGE, **limits}))
    await launcher.aclose()
    assert cure in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_whoever_waits_for_a_socket_in_a_sandbox_hears_that_the_launcher_is_closed() -> None:
    for delay_s in (0.0, 0.01, 0.05):
        namespaces = Namespaces()
        asked = [asyncio.create_task(namespaces.listening(os.getpid(), "127.0.0.1", 0)) for _ in range(20)]
        await asyncio.sleep(delay_s)
        async with asyncio.timeout(10):
            await namespaces.aclose()
            answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                assert os.geteuid() != 0 or str(answer).endswith(": the launcher has been closed"), answer
            else:
                answer.close()
        with pytest.raises(LaunchError, match="the launcher has been closed"):
            await namespaces.listening(os.getpid(), "127.0.0.1", 0)


async def test_too_little_memory_is_the_operators_error(run: str) -> None:
    launcher = OciLauncher(run, max_sandboxes=1)
    with pytest.raises(ConfigError, match="at least 256 MiB"):
        await launcher.check(a_sandbox(DEFAULT_IMAGE, memory_bytes=MIB))
    await launcher.aclose()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A runtime that does what its file says on `run`, and else what runc does."""
    program = tmp_path / "runtime"
    program.write_text('#!/bin/sh\ncase " $* " in *" run "*) . "$0.run";; esac\nexec runc "$@"\n')
    program.chmod(0o755)
    return program


async def test_what_has_ended_is_removed_without_the_runtime_unless_something_is_left(
    run: str, temporary: Path, broken: Path
) -> None:
    broken.write_text('#!/bin/sh\ncase " $* " in *" delete "*) echo x >> "$0.deletes";; esac\nexec runc "$@"\n')
    deletes = Path(f"{broken}.deletes")
    async with oci_launcher_for(run, runtime=str(broken)) as launcher:
        async with oci_probed(launcher, "print('done')") as sandbox:
            await sandbox.exited()
        assert not deletes.exists()
        if os.geteuid() != 0:
            return  # the groups are not this user's to write to
        async with oci_probed(launcher, FOREVER) as sandbox:
            assert control_groups_of(sandbox.sandbox_id)
            (file, *_) = group_files(
                control_groups(sandbox.pid, sandbox.sandbox_id), "pids", "pids.max", "pids.max"
            )
            (file.parent / "below").mkdir()
        assert deletes.read_text() == "x\n"
        assert list(temporary.glob(f"{PREFIX}*/state/[!.]*")) == []
        assert control_groups_of(sandbox.sandbox_id) == []


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (
            'echo \'level=error msg="no \\\\"room\\\\" left"\' >&2; exit 1',
            'the OCI runtime refused: no "room" left',
        ),
        ('echo \'{"level": "error", "msg": "as json"}\' >&2; exit 1', "the OCI runtime refused: as json"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "signal 9"),
        ("exit 0", "no process id"),
    ],
)
async def test_a_runtime_that_refuses_is_a_launch_error_and_leaves_nothing(
    run: str, temporary: Path, broken: Path, does: str, told: str
) -> None:
    Path(f"{broken}.run").write_text(does)
    async with oci_launcher_for(run, runtime=str(broken)) as launcher:
        with pytest.raises(LaunchError) as refused:
            async with oci_probed(launcher, FOREVER):
                pytest.fail("it must not be used")
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)
        Path(f"{broken}.run").write_text("")  # now it works
        async with oci_probed(launcher, "print('done')") as sandbox:
            assert (await sandbox.exited()).exit_code == 0
    assert list(temporary.iterdir()) == []


async def test_a_cancel_while_the_runtime_hangs_is_carried_out_when_it_is_over(
    run: str, temporary: Path, broken: Path
) -> None:
    Path(f"{broken}.run").write_text("sleep 1")
    async with oci_launcher_for(run, runtime=str(broken)) as launcher:

        async def use() -> None:
            async with oci_probed(launcher, FOREVER):
                pytest.fail("it must not be used")

        task = asyncio.create_task(use())
        await asyncio.sleep(0.3)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert list(temporary.glob(f"{PREFIX}*/state/[!.]*")) == []


async def test_a_runtime_that_is_gone_costs_a_start_and_no_living_sandbox(
    run: str, temporary: Path, broken: Path
) -> None:
    Path(f"{broken}.run").write_text("")
    async with oci_launcher_for(run, runtime=str(broken)) as launcher, oci_probed(launcher, FOREVER) as living:
        away = broken.rename(broken.with_name("away"))
        asyncio.get_running_loop().call_later(0.2, away.rename, broken)  # as after an upgrade of the package
        with pytest.raises(LaunchError, match="cannot start"):
            async with oci_probed(launcher, FOREVER):
                pytest.fail("it must not be used")
        assert not is_gone(living.pid)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await living.exited()
    assert list(temporary.iterdir()) == []


@BOTH
async def test_no_key_reaches_keeper_or_container(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-77c1")
    async with oci_launcher_for(run) as launcher, oci_probed(launcher, FOREVER) as sandbox:
        for pid in (sandbox.pid, keeper_of(sandbox.pid)):
            with suppress(PermissionError) if os.geteuid() else nullcontext():  # subordinate ids have it there
                assert b"canary-77c1" not in Path("/proc", str(pid), "environ").read_bytes()
        bundles = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/bundles/{sandbox.sandbox_id}/*"))
        assert bundles
        assert not [path for path in bundles if "canary-77c1" in path.read_text()]
