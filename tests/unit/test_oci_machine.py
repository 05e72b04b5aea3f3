"""What a machine lets an OCI runtime do, what is asked of the runtime, and what a container then shows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import EnvironmentUnusable, SandboxLostError
from orchestrator.launch.contents import PROGRAM, Contents
from orchestrator.launch.control_groups import path_beside_ours
from orchestrator.launch.hardening import MEASURE_NAMES, harden, writable_places
from orchestrator.launch.names import CHANNEL_MOUNT
from orchestrator.launch.oci import user_namespace as users
from orchestrator.launch.oci.bundle import bundle
from orchestrator.launch.oci.machine import advice, does_not_fit, missing_limits, runtime_version, too_low_limits
from orchestrator.launch.oci.program import own_options
from orchestrator.launch.oci.runtime import told_by_runtime
from orchestrator.launch.oci.sandbox import OciSandbox
from orchestrator.launch.oci.user_namespace import UserNamespace, id_range, user_namespace
from orchestrator.launch.oci.verification import UNTOLD_BY_GVISOR, verify
from orchestrator.launch.uids import UidPair
from tests.fakes.plans import a_sandbox

SPEC = a_sandbox("image")
ASKED = harden(SPEC, UidPair(20_000, 20_001), Path("/channel"))
ROOT = Path("/images/1/rootfs")
CONTENTS = Contents("/runtimes/1", {"PATH": "/bin"})
NAME = "sandbox-1"


# ---------------------------------------------------------------- control groups


def machine(root: Path, groups: str, *folders: str, **files: str) -> tuple[Path, Path]:
    """(proc, cgroups) of a machine on which this process is in `groups`."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    for folder in folders:
        (cgroups / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


V1 = "4:memory:/job\n3:cpu,cpuacct:/\n2:pids:/job\n1:name=systemd:/\n0::/\n"
V1_FOLDERS = ("memory/job", "cpu,cpuacct", "pids/job")
SWAP = {"memory/job/memory.memsw.limit_in_bytes": "1"}


def limits(root: Path, groups: str, *folders: str, **files: str) -> dict[str, str]:
    proc, cgroups = machine(root, groups, *folders, **files)
    lines = missing_limits(proc=proc, cgroups=cgroups)
    return dict(line.split(": ", 1) for line in lines)


def test_v1_with_all_controllers_limits_everything(tmp_path: Path) -> None:
    assert limits(tmp_path, V1, *V1_FOLDERS, **SWAP) == {}


def test_v1_without_swap_accounting_is_told(tmp_path: Path) -> None:
    (told,) = limits(tmp_path, V1, *V1_FOLDERS).items()
    assert told[0] == "swap"
    assert "swapaccount=1" in told[1]


def test_v1_that_cannot_be_seen_is_told(tmp_path: Path) -> None:
    told = limits(tmp_path, V1, "memory/job", **SWAP)
    assert set(told) == {"cpus", "pids"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may change every folder")
def test_a_group_of_somebody_else_is_told(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, V1, *V1_FOLDERS, **SWAP)
    (cgroups / "pids" / "job").chmod(0o555)
    (told,) = missing_limits(proc=proc, cgroups=cgroups)
    assert told.startswith("pids: ")
    assert "may not change" in told


def unified(root: Path, own: str, **groups: tuple[str, str]) -> dict[str, str]:
    """What cannot be limited where this process is in `own` and each group (`__` for a slash; the root is `_`) has
    these controllers, and hands those on."""
    files = {}
    for name, (controllers, handed_on) in groups.items():
        folder = "." if name == "_" else name.replace("__", "/")
        files[f"{folder}/cgroup.controllers"] = controllers
        files[f"{folder}/cgroup.subtree_control"] = handed_on
        if name != "_":
            files |= {f"{folder}/cgroup.type": "domain", f"{folder}/cgroup.procs": ""}
    return limits(root, f"0::{own}\n", **files)


ALL = "cpuset cpu io memory pids\n"


@pytest.mark.parametrize(("own", "parent"), [("/user/me/run", "user__me"), ("/", "_")])
def test_v2_needs_the_controllers_beside_its_own_group(tmp_path: Path, own: str, parent: str) -> None:
    assert unified(tmp_path / "all", own, **{parent: (ALL, ALL)}) == {}
    assert unified(tmp_path / "offered", own, **{parent: (ALL, "")}) == {}
    assert set(unified(tmp_path / "none", own)) == {"memory", "swap", "cpus", "pids"}


def test_v2_hands_controllers_on_from_the_machine_s_root(tmp_path: Path) -> None:
    """systemd hands the controller cpu to a slice only when a service in it asks for that."""
    job = {"system": ("memory pids\n", "memory pids\n"), "system__job": ("memory pids\n", "")}
    assert unified(tmp_path / "root", "/system/job", _=(ALL, "memory pids\n"), **job) == {}
    told = unified(tmp_path / "old", "/system/job", _=("memory pids\n", "memory pids\n"), **job)
    assert told == {"cpus": "cannot be limited here: the kernel has no control groups with cpu"}


def test_v2_controllers_that_somebody_else_must_hand_on_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # to root, nothing is another's
    told = unified(tmp_path, "/me/run", me=(ALL, ""))
    assert set(told) == {"memory", "swap", "cpus", "pids"}
    assert all("does not offer" in why and "let it be delegated" in why for why in told.values())


def test_v2_group_with_processes_hands_nothing_on(tmp_path: Path) -> None:
    files = {"job/cgroup.controllers": ALL, "job/cgroup.subtree_control": "", "job/cgroup.type": "domain"}
    told = limits(tmp_path, "0::/job/run\n", **files, **{"job/cgroup.procs": "17\n"})
    assert set(told) == {"memory", "swap", "cpus", "pids"}
    assert all("has processes" in why for why in told.values())


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        (V1, NAME),
        ("0::/user/me/run\n", f"/user/me/{NAME}"),
        ("0::/\n", f"/{NAME}"),
        ("1:name=systemd:/me\n0::/me\n", NAME),
    ],
)
def test_a_container_s_group_is_beside_ours(tmp_path: Path, groups: str, path: str) -> None:
    proc, _ = machine(tmp_path, groups)
    assert path_beside_ours(NAME, proc) == path


def test_v2_without_swap_accounting_is_told(tmp_path: Path) -> None:
    offered = {"job/cgroup.controllers": ALL, "job/cgroup.subtree_control": ALL, "job/one/memory.max": "max"}
    (told,) = limits(tmp_path / "none", "0::/job/one\n", **offered).items()
    assert told[0] == "swap"
    assert "swapaccount=1" in told[1]
    counted = {"job/two/memory.max": "max", "job/two/memory.swap.max": "max"}
    assert limits(tmp_path / "some", "0::/job/one\n", **offered, **counted) == {}


@pytest.mark.parametrize(
    ("script", "told"),
    [
        # As crun does for a user without XDG_RUNTIME_DIR.
        ('[ "$1" = --root ] && echo "crun version 1.21" || exit 1', "crun version 1.21"),
        ("echo cannot load libcap >&2; exit 127", "does not start: cannot load libcap"),
        ("exit 3", "does not start: exit code 3"),
        ("echo", "does not start"),
    ],
)
def test_a_runtime_s_version_or_why_it_does_not_start(tmp_path: Path, script: str, told: str) -> None:
    program = tmp_path / "runtime"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    if "does not start" not in told:
        assert runtime_version(str(program)) == told
        return
    with pytest.raises(EnvironmentUnusable, match=told):
        runtime_version(str(program))


def test_what_is_waived_is_not_told(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/\n")
    assert len(missing_limits(proc=proc, cgroups=cgroups)) == 4
    assert missing_limits(frozenset({"memory", "swap", "cpus", "pids"}), proc=proc, cgroups=cgroups) == []


def test_a_limit_that_cannot_be_set_is_told() -> None:
    low, high = {"core": 0, "nofile": 10}, {"core": 0, "nofile": 1 << 40}
    assert too_low_limits(low, forked=True) is None
    assert "RLIMIT_NOFILE of 1099511627776" in (too_low_limits(high, forked=True) or "")


def test_sizes_that_do_not_fit_and_old_runtimes_are_told() -> None:
    assert does_not_fit(SPEC) is None
    assert "--env.sandbox_memory" in (does_not_fit(a_sandbox("i", memory_bytes=1 << 60)) or "")
    assert "--env.sandbox_cpus" in (does_not_fit(a_sandbox("i", cpus=10_000)) or "")
    assert list(advice(SPEC, 1, "runc version 1.3.4")) == []
    assert [line.split()[0] for line in advice(SPEC, 1 << 20, "runc version 1.1.5+ds1")] == ["1048576", "runc"]
    assert list(advice(SPEC, 1, "crun version 0.1")) == []


# ---------------------------------------------------------------- users


@pytest.fixture
def ordinary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., UserNamespace | None]:
    """The namespace of user 1000, in a group of its own, where /etc has these lines."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1001)
    monkeypatch.setattr(users, "_name", lambda user: "me")
    monkeypatch.setattr(users.shutil, "which", lambda name: f"/usr/bin/{name}")

    def made(subuid: str, subgid: str | None = None, **sysctl: str) -> UserNamespace | None:
        (tmp_path / "subuid").write_text(subuid)
        (tmp_path / "subgid").write_text(subuid if subgid is None else subgid)
        for name, value in sysctl.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(value)
        return user_namespace(etc=tmp_path, proc_sys=tmp_path)

    return made


def test_root_needs_no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert user_namespace() is None


@pytest.mark.parametrize("who", ["me", "1000"])
def test_the_user_is_the_agent_and_the_others_are_subordinate(
    ordinary: Callable[..., UserNamespace | None], who: str
) -> None:
    made = ordinary(f"you:1:9\n{who}:100000:60005\n# {who}:5:5\n{who}:bad:1\n{who}:300000:10\n")
    assert made is not None
    assert made.users == [
        id_range(0, 100_000, 60_000),
        id_range(60_000, 1000, 1),
        id_range(60_001, 160_000, 5),
        id_range(60_006, 300_000, 10),
    ]
    assert made.groups[1] == id_range(60_000, 1001, 1)
    assert made.agent_maps == ("0 60000 1\n1 60001 5\n6 60006 9\n65534 60015 1",) * 2


@pytest.mark.parametrize(
    ("size", "ids"),
    [
        (60_000, "0 60000 1"),
        (60_001, "0 60000 1\n65534 60001 1"),
        (65_536, "0 60000 1\n1 60001 5535\n65534 65536 1"),
        (125_535, "0 60000 1\n1 60001 65535"),
        (200_000, "0 60000 1\n1 60001 65535"),
    ],
)
def test_an_agent_has_the_ids_that_are_left(
    ordinary: Callable[..., UserNamespace | None], size: int, ids: str
) -> None:
    made = ordinary(f"me:100000:{size}")
    assert made is not None
    assert made.agent_maps == (ids, ids)


def test_a_command_is_run_as_root_of_the_namespace(ordinary: Callable[..., UserNamespace | None]) -> None:
    made = ordinary("me:100000:60000")
    assert made is not None
    assert made.entered_by(["/bin/runc"])[4:] == [
        "0 100000 60000 60000 1000 1",
        "0 100000 60000 60000 1001 1",
        "/bin/runc",
    ]


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"subuid": ""}, "usermod --add-subuids"),
        ({"subuid": "me:100000:59998"}, "60000 are needed"),
        ({"subuid": "me:100000:65536", "subgid": ""}, "usermod --add-subgids"),
        ({"subuid": "me:100000:65536", "user/max_user_namespaces": "0"}, "user/max_user_namespaces"),
        ({"subuid": "me:100000:65536", "kernel/unprivileged_userns_clone": "0\n"}, "unprivileged_userns_clone"),
    ],
)
def test_what_an_ordinary_user_lacks_is_told_with_its_cure(
    ordinary: Callable[..., UserNamespace | None], given: dict[str, str], cure: str
) -> None:
    with pytest.raises(EnvironmentUnusable, match=cure):
        ordinary(**given)


def test_without_the_tools_of_uidmap_they_are_named(
    ordinary: Callable[..., UserNamespace | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentUnusable, match="install uidmap"):
        ordinary("me:100000:65536")


# ---------------------------------------------------------------- what is asked of the runtime


def test_every_measure_is_asked_of_the_runtime() -> None:
    told = bundle(ROOT, CONTENTS, ASKED, NAME)
    process, linux = told["process"], told["linux"]
    assert told["root"] == {"path": "/images/1/rootfs", "readonly": True}
    assert process["args"] == [*PROGRAM, "--env", "PATH=/bin", *ASKED.arguments]
    assert {name for names in process["capabilities"].values() for name in names} == {"CAP_SETGID", "CAP_SETUID"}
    assert set(process["capabilities"]) == {"bounding", "effective", "permitted"}
    assert process["noNewPrivileges"] is True
    assert {limit["type"] for limit in process["rlimits"]} == {
        *("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_MSGQUEUE", "RLIMIT_NOFILE")
    }
    kinds = {"cgroup", "ipc", "mount", "network", "pid", "uts"}
    assert {entry["type"] for entry in linux["namespaces"]} == kinds
    assert not any("path" in entry for entry in linux["namespaces"]), "joins nothing"
    assert linux["resources"] == {
        "memory": {"limit": 1 << 30, "swap": 1 << 30},
        "cpu": {"period": 100_000, "quota": 100_000},
        "pids": {"limit": 128},
        "devices": [{"allow": False, "access": "rwm"}],
    }
    assert linux["seccomp"]["defaultAction"] == "SCMP_ACT_ERRNO"
    assert "architectures" not in linux["seccomp"]
    mounts = {mount["destination"]: mount for mount in told["mounts"]}
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(mounts[CHANNEL_MOUNT]["options"])
    for place in writable_places(SPEC.memory_bytes, UidPair(20_000, 20_001)):
        assert mounts[place.target]["options"] == list(place.options)
    writable = {name for name, mount in mounts.items() if "ro" not in mount["options"]}
    assert "max=8" in mounts["/dev/pts"]["options"]
    assert writable == {
        *("/proc", "/dev", "/dev/pts", "/workspace", "/attachments", "/tmp", "/dev/shm"),
        "/run/channel",  # root's
    }
    assert mounts["/opt/sandbox"] == {
        "destination": "/opt/sandbox",
        "type": "bind",
        "source": "/runtimes/1",
        "options": ["bind", "ro", "nosuid", "nodev"],
    }
    assert json.loads(json.dumps(told)) == told


def test_the_folder_before_the_channel_is_closed() -> None:
    told = bundle(ROOT, CONTENTS, ASKED, NAME)
    targets = [mount["destination"] for mount in told["mounts"]]
    assert targets.index("/run/channel") < targets.index(CHANNEL_MOUNT)


def test_limits_that_nobody_can_set_are_not_asked_for() -> None:
    told = bundle(ROOT, CONTENTS, ASKED, NAME, unlimited=frozenset({"memory", "swap", "cpus", "pids"}))
    assert set(told["linux"]["resources"]) == {"devices"}
    assert "cgroupsPath" not in told["linux"]
    told = bundle(ROOT, CONTENTS, ASKED, NAME, unlimited=frozenset({"swap"}))
    assert told["linux"]["resources"]["memory"] == {"limit": 1 << 30}


# ---------------------------------------------------------------- what a container shows

STATUS = "Name:\tpython\nCapEff:\t00000000000000c0\nCapBnd:\t00000000000000c0\nNoNewPrivs:\t1\nSeccomp:\t2\n"
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units     \n"
    "Max file size             1073741824           1073741824           bytes     \n"
    "Max core file size        0                    0                    bytes     \n"
    "Max open files            1024                 1024                 files     \n"
    "Max msgqueue size         0                    0                    bytes     \n"
)
CONTAINER = f"3:cpu,cpuacct:/{NAME}\n2:memory:/{NAME}\n1:pids:/{NAME}\n0::/\n"


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A machine with a container of pid 7 that is as asked."""
    for pid in ("self", "7"):
        (tmp_path / "proc" / pid / "ns").mkdir(parents=True)
        for kind in ("net", "ipc", "pid", "uts", "mnt"):
            (tmp_path / "proc" / pid / "ns" / kind).symlink_to(f"{kind}:[{pid}]")
    own = tmp_path / "proc" / "7"
    (own / "status").write_text(STATUS)
    (own / "oom_score_adj").write_text("500\n")
    (own / "mountinfo").write_text(
        "36 35 98:0 /rootfs / ro,relatime - ext4 /dev/vda rw\n37 36 0:1 / /tmp rw - tmpfs t rw\n"
        "38 36 98:0 /runtimes/1 /opt/sandbox ro,nosuid,nodev,relatime - ext4 /dev/vda rw\n"
    )
    (own / "limits").write_text(LIMITS)
    (own / "cgroup").write_text(CONTAINER)
    for name, text in (
        ("memory/{}/memory.limit_in_bytes", "1073741824"),
        ("memory/{}/memory.memsw.limit_in_bytes", "1073741824"),
        ("pids/{}/pids.max", "128"),
        ("cpu/{}/cpu.cfs_quota_us", "100000"),
        ("cpu/{}/cpu.cfs_period_us", "100000"),
    ):
        (file := tmp_path / "cgroup" / name.format(NAME)).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return tmp_path


def problems(shown: Path, waived: frozenset[str] = frozenset()) -> list[str]:
    return verify(7, NAME, ASKED, waived, proc=shown / "proc", cgroups=shown / "cgroup")


def test_a_container_as_asked_passes(shown: Path) -> None:
    assert problems(shown) == []


@pytest.mark.parametrize(
    ("measure", "file", "old", "new"),
    [
        ("capabilities", "proc/7/status", "CapBnd:\t00000000000000c0", "CapBnd:\t00000000002000c0"),
        ("capabilities", "proc/7/status", "CapEff:\t00000000000000c0", "CapEff:\t00000000002000c0"),
        ("no_new_privileges", "proc/7/status", "NoNewPrivs:\t1", "NoNewPrivs:\t0"),
        ("seccomp", "proc/7/status", "Seccomp:\t2", "Seccomp:\t0"),
        ("oom_score", "proc/7/oom_score_adj", "500", "0"),
        ("read_only_root", "proc/7/mountinfo", "/ ro,relatime", "/ rw,relatime"),
        ("mounts", "proc/7/mountinfo", "/opt/sandbox ro,", "/opt/sandbox rw,"),
        ("mounts", "proc/7/mountinfo", "ro,nosuid,nodev", "ro,nodev"),
        ("mounts", "proc/7/mountinfo", "ro,nosuid,nodev", "ro,nosuid"),
        ("mounts", "proc/7/mountinfo", "/opt/sandbox ", "/opt/other "),
        (
            "ulimits",
            "proc/7/limits",
            "Max open files            1024                 1024",
            "Max open files            1024                 4096",
        ),
        (
            "ulimits",
            "proc/7/limits",
            "0                    bytes     \nMax open",
            "unlimited            bytes     \nMax open",
        ),
        ("memory", "cgroup/memory/{}/memory.limit_in_bytes", "1073741824", "9223372036854771712"),
        ("swap", "cgroup/memory/{}/memory.memsw.limit_in_bytes", "1073741824", "2147483648"),
        ("pids", "cgroup/pids/{}/pids.max", "128", "max"),
        ("cpus", "cgroup/cpu/{}/cpu.cfs_quota_us", "100000", "-1"),
        ("cpus", "cgroup/cpu/{}/cpu.cfs_period_us", "100000", "50000"),
    ],
)
def test_each_weaker_measure_is_named_and_can_be_waived(
    shown: Path, measure: str, file: str, old: str, new: str
) -> None:
    place = shown / file.format(NAME)
    text = place.read_text()
    assert old in text
    place.write_text(text.replace(old, new))
    (problem,) = problems(shown)
    assert problem.startswith(f"{measure} ")
    assert measure in MEASURE_NAMES
    assert problems(shown, frozenset({measure})) == []


@pytest.mark.parametrize(
    ("kind", "measure"),
    [("net", "network"), ("ipc", "ipc"), ("pid", "namespaces"), ("uts", "namespaces"), ("mnt", "namespaces")],
)
def test_a_namespace_of_the_machine_is_named(shown: Path, kind: str, measure: str) -> None:
    own = shown / "proc" / "7" / "ns" / kind
    own.unlink()
    own.symlink_to(f"{kind}:[self]")
    (problem,) = problems(shown)
    assert problem.startswith(f"{measure} ")


def test_of_gvisor_only_the_limits_are_looked_at_from_outside(shown: Path) -> None:
    (shown / "proc" / "7" / "status").write_text(STATUS.replace("2\n", "0\n").replace("00000000000000c0", "ffff"))
    assert len(problems(shown)) == 2
    assert problems(shown, UNTOLD_BY_GVISOR) == []
    (shown / "cgroup" / "pids" / NAME / "pids.max").write_text("max\n")
    assert len(problems(shown, UNTOLD_BY_GVISOR)) == 1


def test_a_container_that_has_ended_is_an_oserror(shown: Path) -> None:
    (shown / "proc" / "7" / "status").unlink()
    with pytest.raises(OSError, match="No such file"):
        problems(shown)


# ---------------------------------------------------------------- how it ended


async def never(name: str, still: bool = False) -> None:
    pytest.fail("nothing is to be killed, or held still")


@pytest.mark.parametrize(
    ("status", "kills", "told"),
    [
        (0, "oom_kill 0", (0, False)),
        (3 << 8, "oom_kill 0", (3, False)),
        (11, "oom_kill 0", (139, False)),  # a crash of pid 1
        (9, "oom_kill 1", (137, True)),
        (137 << 8, "oom_kill 2", (137, True)),  # the runner was killed, and pid 1 says so
        (137 << 8, "oom_kill 0", (137, False)),
        (9, "oom_kill 0", (137, False)),  # a daemon that watches memory kills without that count
        (15, "oom_kill 0", None),
        (143 << 8, "oom_kill 0", None),  # pid 1 was asked to end
        (143 << 8, None, None),
        (9, None, (137, False)),  # who used up the machine's memory must not get another try
    ],
)
async def test_whose_doing_an_end_is(
    tmp_path: Path, status: int, kills: str | None, told: tuple[int, bool] | None
) -> None:
    sandbox = OciSandbox(UidPair(20_000, 20_001), never, never)
    if kills is not None:
        sandbox.kills = tmp_path / "memory.oom_control"
        sandbox.kills.write_text(f"oom_kill_disable 0\nunder_oom 0\n{kills}\n")
    sandbox.ended(status, "last \x1b words")
    if told is None:
        with pytest.raises(SandboxLostError, match="somebody else"):
            await sandbox.exited()
        return
    ended = await sandbox.exited()
    assert (ended.exit_code, ended.oom_killed) == told
    assert ended.reason.endswith("last ? words") == (status != 0)
    sandbox.lose(SandboxLostError("too late to matter"))
    assert await sandbox.exited() == ended


# ---------------------------------------------------------------- what the runtime says


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('time="now" level=error msg="runc run failed: no \\"room\\""', 'runc run failed: no "room"'),
        ('warning\n{"level": "error", "msg": "as\\njson"}', "as json"),
        ("plain \x1b[31mred", "plain ?[31mred"),
        ("x" * 9000, "x" * 400),
        ("", ""),
        ("[1]", "[1]"),
    ],
)
def test_errors_of_runtimes_become_one_plain_line(said: str, told: str) -> None:
    assert told_by_runtime(said) == f"the OCI runtime refused: {told}"


def test_gvisor_gets_the_options_it_needs(tmp_path: Path) -> None:
    for name, flags, options in (
        ("runc", "-host-uds value", []),
        ("runsc", "-host-uds value", ["--network=none", "--host-uds=open"]),
        ("runsc-old", "-fsgofer-host-uds", ["--network=none", "--fsgofer-host-uds"]),
    ):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{flags}' >&2\n")
        program.chmod(0o755)
        assert own_options(str(program)) == options
    with pytest.raises(EnvironmentUnusable, match="does not start"):
        own_options(str(tmp_path / "runsc-missing"))
