"""What the Engine is asked for, and what is refused when it did not obey. No Engine needed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError, EnvironmentUnusable, ImageUnusable
from orchestrator.launch.confinement import untold_by, verify_confinement
from orchestrator.launch.contents import ENVIRONMENT, PROGRAM, Contents, image_environment
from orchestrator.launch.docker.facts import advice, engine_problem, image_problem, missing_features
from orchestrator.launch.docker.request import create_body, image_volumes
from orchestrator.launch.docker.verification import MEASURES, verify
from orchestrator.launch.fitting import old_runc, too_big
from orchestrator.launch.hardening import (
    IDENTITIES,
    MEASURE_NAMES,
    MIB,
    PROCESS_BYTES,
    demand,
    harden,
    seccomp_profile,
    writable_places,
)
from orchestrator.launch.names import CHANNEL_MOUNT, DEFAULT_IMAGE
from orchestrator.launch.oci.writable import agent_arguments
from orchestrator.launch.uids import LAST_UID, SLOTS, UidPair, UidSlots
from orchestrator.types import MIN_MEMORY_BYTES, Confinement, Mount, SandboxSpec
from sandbox.boot.arguments import box_of
from sandbox.types import AgentUser
from tests.fakes.plans import a_sandbox

SPEC = a_sandbox(image=DEFAULT_IMAGE)
UIDS = UidPair(20_000, 20_001)
RUNTIME = Mount("/opt/sandbox", "ext4", read_only=True, no_suid=True, no_dev=True)
CONTENTS = Contents("/runtimes/1", {"A": "b", "LD_PRELOAD": "/lib/evil.so", "PATH": "/its/bin"})


def body(spec: SandboxSpec = SPEC, **labels: str) -> dict[str, Any]:
    """What the Engine is asked for."""
    return create_body(spec, CONTENTS, harden(spec, UIDS, Path("/channel")), labels)


CONFIG = body(run="r")


def obeyed(config: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the Engine answers to inspect for a container that is as asked; shapes of Engine 20.10."""
    config = config or CONFIG
    host = copy.deepcopy(config["HostConfig"])
    host |= {"Privileged": False, "PidMode": "", "UTSMode": "", "UsernsMode": "", "Runtime": "runc"}
    host |= {"Devices": None, "DeviceRequests": None, "DeviceCgroupRules": None, "OomKillDisable": False}
    return {
        "Config": {"User": "0:0"},
        "HostConfig": host,
        "Mounts": [
            {
                "Type": mount["Type"],
                "Destination": mount["Target"],
                "RW": not mount["ReadOnly"],
                "Name": mount.get("Source", "chosen by the Engine"),
            }
            for mount in config["HostConfig"]["Mounts"]
        ],
        "NetworkSettings": {"Networks": {}},
    }


def host(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda inspected: inspected["HostConfig"].update(changes)


def network(inspected: dict[str, Any]) -> None:
    inspected["NetworkSettings"]["Networks"]["bridge"] = {"IPAddress": "172.17.0.2"}


def writable_channel(inspected: dict[str, Any]) -> None:
    inspected["Mounts"][0]["RW"] = True


def another_runtime(inspected: dict[str, Any]) -> None:
    inspected["Mounts"][1]["Name"] = "another"


def anonymous_volume(inspected: dict[str, Any]) -> None:
    inspected["Mounts"].append({"Type": "volume", "Destination": "/data", "RW": True})


def unlimited_terminals(inspected: dict[str, Any]) -> None:
    inspected["HostConfig"]["Mounts"][2]["VolumeOptions"]["DriverConfig"]["Options"]["o"] = "ptmxmode=0666"


def other_user(inspected: dict[str, Any]) -> None:
    inspected["Config"]["User"] = "nobody"


def without_seccomp(inspected: dict[str, Any]) -> None:
    inspected["HostConfig"]["SecurityOpt"] = ["no-new-privileges", "seccomp=unconfined"]


def without_no_new_privileges(inspected: dict[str, Any]) -> None:
    inspected["HostConfig"]["SecurityOpt"].remove("no-new-privileges")


def bigger_tmp(inspected: dict[str, Any]) -> None:
    inspected["HostConfig"]["Tmpfs"]["/tmp"] = "size=1g"


WEAKENED = [
    ("network", network),
    ("read_only_root", host(ReadonlyRootfs=False)),
    ("tmpfs", bigger_tmp),
    ("tmpfs", host(Tmpfs=None)),
    ("mounts", writable_channel),
    ("mounts", another_runtime),
    ("mounts", anonymous_volume),
    ("privileged", host(Privileged=True)),
    ("capabilities", host(CapAdd=["SETGID", "SETUID", "SYS_ADMIN"])),
    ("capabilities", host(CapDrop=None)),
    ("no_new_privileges", without_no_new_privileges),
    ("seccomp", without_seccomp),
    ("seccomp", host(SecurityOpt=["no-new-privileges"])),
    ("memory", host(Memory=0)),
    ("swap", host(MemorySwap=-1)),
    ("oom_kill", host(OomKillDisable=True)),
    ("cpus", host(NanoCpus=0)),
    ("pids", host(PidsLimit=None)),
    ("terminals", unlimited_terminals),
    ("ulimits", host(Ulimits=[])),
    ("ipc", host(IpcMode="host")),
    ("namespaces", host(PidMode="host")),
    ("namespaces", host(UsernsMode="host")),
    ("devices", host(Devices=[{"PathOnHost": "/dev/kmsg"}])),
    ("devices", host(DeviceRequests=[{"Count": -1}])),
    ("hidden_paths", host(MaskedPaths=[])),
    ("hidden_paths", host(ReadonlyPaths=None)),
    ("log_limits", host(LogConfig={"Type": "json-file", "Config": {}})),
    ("user", other_user),
    ("oom_score", host(OomScoreAdj=-1000)),
]


def test_container_that_is_as_asked_passes() -> None:
    assert verify(obeyed(), CONFIG) == []


@pytest.mark.parametrize(("name", "weaken"), WEAKENED)
def test_each_weakened_setting_is_named_and_can_be_waived(
    name: str, weaken: Callable[[dict[str, Any]], None]
) -> None:
    inspected = obeyed()
    weaken(inspected)
    (problem,) = verify(inspected, CONFIG)
    assert problem.startswith(f"{name} is ")
    assert verify(inspected, CONFIG, frozenset({name})) == []
    with pytest.raises(EnvironmentUnusable, match=name):
        demand([problem])


def test_every_measure_has_a_weakened_case() -> None:
    assert {name for name, _ in WEAKENED} | {"runtime"} == set(MEASURES)
    assert set(MEASURES) | {IDENTITIES, "root_size", "id_ranges"} == MEASURE_NAMES  # an Engine bounds no root


def test_another_runtime_than_the_one_asked_for_is_refused() -> None:
    config = body(replace(SPEC, runtime="runsc"))
    (problem,) = verify(obeyed(config), config)
    assert problem.startswith("runtime is 'runc'")


def test_newer_engines_spell_the_same_settings_differently() -> None:
    inspected = obeyed()
    inspected["HostConfig"]["CapAdd"] = ["CAP_SETUID", "CAP_SETGID"]
    profile = json.dumps(seccomp_profile(allow_localhost_tcp=False), separators=(",", ":"))
    inspected["HostConfig"]["SecurityOpt"] = [f"seccomp={profile}", "no-new-privileges:true"]
    inspected["HostConfig"]["UTSMode"] = "private"
    assert verify(inspected, CONFIG) == []


@pytest.mark.parametrize("memory_bytes", [MIN_MEMORY_BYTES, 1 << 29, 1 << 30, 3_333_333_333, 1 << 34])
def test_full_tmpfs_always_leave_memory_for_the_processes(memory_bytes: int) -> None:
    places = writable_places(memory_bytes, UIDS)
    sizes = [place.size_bytes for place in places]
    assert len(sizes) == 4
    assert min(sizes) >= 1 * MIB
    assert sum(sizes) <= memory_bytes - PROCESS_BYTES
    for place in places:
        assert {"noexec", "nosuid", "nodev", f"size={place.size_bytes}"} <= set(place.options)
        assert any(option.startswith("nr_inodes=") for option in place.options)


@pytest.mark.parametrize("spec", [replace(SPEC, memory_bytes=255 * MIB), replace(SPEC, pids=47)])
def test_limits_nothing_can_run_under_are_refused(spec: SandboxSpec) -> None:
    with pytest.raises(ConfigError, match="at least"):
        harden(spec, UIDS, Path("/channel"))


def test_runtime_is_named_only_when_asked_for() -> None:
    assert "Runtime" not in CONFIG["HostConfig"]
    config = body(replace(SPEC, runtime="runsc"))
    assert config["HostConfig"]["Runtime"] == "runsc"


def test_pid_1_has_an_environment_of_its_own_and_the_agent_that_of_the_image() -> None:
    given = dict(entry.partition("=")[::2] for entry in CONFIG["Env"])
    assert {name for name, value in given.items() if value} == set(ENVIRONMENT)
    assert {"A", "LD_PRELOAD"} < set(CONFIG["Env"]), "a name without a value takes the image's away"
    environment = dict(box_of([*CONFIG["Entrypoint"][len(PROGRAM) :], *CONFIG["Cmd"]]).environment)
    assert environment == {"A": "b", "PATH": "/its/bin"}, "LD_PRELOAD would end the sandbox's Python"
    assert json.loads(json.dumps(CONFIG)) == CONFIG


def test_an_image_without_a_path_has_dockers() -> None:
    assert "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" in Contents("/r", {}).command


def test_an_environment_is_read_as_docker_does_and_has_a_bound() -> None:
    assert image_environment("i", ["A=b=c", "B=", "no value", "=x", "A=d"]) == {"A": "d", "B": ""}
    with pytest.raises(ImageUnusable, match="image i takes 70002 bytes"):
        image_environment("i", [f"A={'x' * 70_000}"])


def test_a_volume_of_an_image_is_one_for_all_and_read_only() -> None:
    volumes = image_volumes("i", "sha256:1", ["/data/", "var/lib", "/tmp"])
    assert set(volumes) == {"/data", "/var/lib"}, "what is ours has a limit"
    contents = replace(CONTENTS, volumes=volumes)
    mounts = create_body(SPEC, contents, harden(SPEC, UIDS, Path("/channel")), {})["HostConfig"]["Mounts"]
    assert {(m["Source"], m["ReadOnly"]) for m in mounts if m["Target"] in volumes} == {
        (name, True) for name in volumes.values()
    }
    seen = replace(CONFINED, mounts=(*CONFINED.mounts, *(Mount(p, "ext4", read_only=True) for p in volumes)))
    assert verify_confinement(seen, SPEC, volumes=volumes) == []
    assert [line.partition(":")[0] for line in verify_confinement(seen, SPEC)] == ["mounts", "mounts"]


@pytest.mark.parametrize("place", ["/", "/opt", "/opt/sandbox/app", "/proc/sys", "/run", "/tmp/below", "//opt//"])
def test_a_volume_over_ours_is_refused(place: str) -> None:
    with pytest.raises(EnvironmentUnusable, match="VOLUME"):
        image_volumes("i", "sha256:1", [place])


def rules(profile: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for rule in profile["syscalls"]:
        for name in rule["names"]:
            found.setdefault(name, []).append(rule)
    return found


DANGEROUS = {
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "io_setup", "userfaultfd", "memfd_secret"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    *("bpf", "perf_event_open", "keyctl", "add_key", "request_key", "seccomp", "socketcall", "modify_ldt"),
    *("mount", "umount", "umount2", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick"),
    *("mount_setattr", "pivot_root", "chroot", "unshare", "setns", "open_by_handle_at", "name_to_handle_at"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "reboot", "swapon", "swapoff", "acct"),
    *("quotactl", "syslog", "iopl", "ioperm", "lookup_dcookie", "settimeofday", "clock_settime", "vhangup"),
    *("fanotify_init", "fanotify_mark", "sync", "syncfs"),
}


def test_profile_denies_what_is_not_listed_and_lists_nothing_dangerous() -> None:
    profile = seccomp_profile(allow_localhost_tcp=False)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert "architectures" not in profile
    assert "archMap" not in profile  # native only: no 32-bit socketcall around the rules
    assert DANGEROUS & set(rules(profile)) == set()


def test_only_unix_sockets_unless_localhost_is_allowed() -> None:
    def families(profile: dict[str, Any], call: str) -> set[int]:
        return {rule["args"][0]["value"] for rule in rules(profile)[call]}

    strict, open_ = seccomp_profile(allow_localhost_tcp=False), seccomp_profile(allow_localhost_tcp=True)
    assert families(strict, "socket") == {1}
    assert families(open_, "socket") == {1, 2, 10}
    assert families(open_, "socketpair") == {1}
    assert all(len(r["args"]) == 2 for r in rules(open_)["socket"] if r["args"][0]["value"] != 1)


def test_clone3_is_answered_with_enosys_so_that_libc_falls_back() -> None:
    (rule,) = rules(seccomp_profile(allow_localhost_tcp=False))["clone3"]
    assert (rule["action"], rule["errnoRet"]) == ("SCMP_ACT_ERRNO", 38)


CONFINED = Confinement(
    capability_bounding_set=0xC0,
    no_new_privileges=True,
    seccomp_mode=2,
    network_interfaces=("lo",),
    root_read_only=True,
    runner_uid=20_000,
    worker_uid=20_001,
    process_id=1,
    own_control_groups=True,
    mounts=(
        Mount("/", "overlay", read_only=True),
        Mount("/proc", "proc"),
        Mount("/dev", "tmpfs", size_bytes=1 << 26),
        Mount("/sys/fs/cgroup", "tmpfs"),
        Mount("/sys/fs/cgroup/pids", "cgroup", read_only=True),
        Mount(CHANNEL_MOUNT, "ext4", read_only=True),
        RUNTIME,
        Mount("/dev/pts", "devpts"),
        *(Mount(target, "tmpfs", False, True, True, True, 4096, 8) for target in CONFIG["HostConfig"]["Tmpfs"]),
    ),
    limits={
        "memory": SPEC.memory_bytes,
        "memory_and_swap": SPEC.memory_bytes,
        "cpu_millis": 1000,
        "pids": 128,
        "terminals": 8,
        "core": 0,
        "fsize": 1 << 30,
        "msgqueue": 0,
        "nofile": 1024,
    },
    devices=("null", "pts"),
    exposed_paths=(),
)


def with_mount(*mounts: Mount) -> dict[str, Any]:
    """These in the place of those with the same target."""
    targets = {mount.target for mount in mounts}
    return {"mounts": (*(m for m in CONFINED.mounts if m.target not in targets), *mounts)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("read_only_root", with_mount(Mount("/", "overlay"))),
        ("mounts", with_mount(Mount("/host", "ext4", read_only=True))),
        ("mounts", with_mount(Mount(CHANNEL_MOUNT, "ext4"))),
        ("mounts", with_mount(Mount("/etc/hosts", "ext4"))),
        ("mounts", {"mounts": tuple(m for m in CONFINED.mounts if m is not RUNTIME)}),
        ("mounts", {"mounts": (*CONFINED.mounts, RUNTIME)}),
        ("mounts", {"mounts": tuple(replace(m, read_only=m is not RUNTIME) for m in CONFINED.mounts)}),
        ("mounts", {"mounts": tuple(replace(m, no_suid=m is not RUNTIME) for m in CONFINED.mounts)}),
        ("mounts", {"mounts": tuple(replace(m, no_dev=m is not RUNTIME) for m in CONFINED.mounts)}),
        ("tmpfs", {"mounts": tuple(m for m in CONFINED.mounts if m.target != "/tmp")}),
        ("tmpfs", with_mount(Mount("/tmp", "tmpfs", False, True, True, True, 0, 16))),
        ("tmpfs", with_mount(Mount("/tmp", "tmpfs", False, True, True, True, 1 << 30, 16))),
        ("tmpfs", with_mount(Mount("/tmp", "tmpfs", False, True, True, True, 4096, 1 << 20))),
        ("tmpfs", with_mount(Mount("/workspace", "tmpfs", False, True, True, False, 4096, 16))),
        ("memory", {"limits": {**CONFINED.limits, "memory": 1 << 31}}),
        ("swap", {"limits": {**CONFINED.limits, "memory_and_swap": 1 << 31}}),
        ("cpus", {"limits": {**CONFINED.limits, "cpu_millis": 2000}}),
        ("pids", {"limits": {name: n for name, n in CONFINED.limits.items() if name != "pids"}}),
        ("terminals", {"limits": {name: n for name, n in CONFINED.limits.items() if name != "terminals"}}),
        ("terminals", {"limits": {**CONFINED.limits, "terminals": 1024}}),
        ("ulimits", {"limits": {**CONFINED.limits, "nofile": 1 << 20}}),
        ("namespaces", {"process_id": 4711}),
        ("namespaces", {"own_control_groups": False}),
        ("devices", {"devices": ("kmsg", "null")}),
        ("hidden_paths", {"exposed_paths": ("/proc/keys",)}),
        ("identities", {"runner_uid": 1000, "worker_uid": 1001}),
        ("capabilities", {"capability_bounding_set": 0xC0 | 1 << 21}),
        ("no_new_privileges", {"no_new_privileges": False}),
        ("seccomp", {"seccomp_mode": 0}),
        ("network", {"network_interfaces": ("lo", "eth0")}),
        ("read_only_root", {"root_read_only": False}),
        ("identities", {"runner_uid": 0, "worker_uid": 0}),
        ("identities", {"worker_uid": 20_000}),
    ],
)
def test_what_the_sandbox_sees_of_itself_is_checked(name: str, changes: dict[str, Any]) -> None:
    assert verify_confinement(CONFINED, SPEC) == []
    weak = replace(CONFINED, **changes)
    (problem,) = verify_confinement(weak, SPEC)
    assert problem.startswith(f"{name}: ")
    assert name in MEASURE_NAMES
    assert verify_confinement(weak, SPEC, frozenset({name})) == []


WRITABLE = replace(SPEC, root="writable", storage_bytes=64 * MIB, storage_inodes=1000)
WRITABLE_SEEN = replace(
    CONFINED,
    root_read_only=False,
    mounts=(
        *(m for m in CONFINED.mounts if m.target not in ("/", "/tmp", "/workspace")),
        Mount("/", "overlay", False, True, True, False, 64 * MIB, 1000),
    ),
)


@pytest.mark.parametrize(
    ("name", "weak"),
    [
        ("root_size", Mount("/", "overlay", False, True, True, False, 65 * MIB, 1000)),
        ("root_size", Mount("/", "overlay", False, True, True, False, 64 * MIB, 1001)),
        ("root_size", Mount("/", "overlay", False, True, True, False, 0, 0)),
        ("root_size", Mount("/", "ext4", False, True, True, False, 64 * MIB, 1000)),
        ("mounts", Mount("/", "overlay", False, False, True, False, 64 * MIB, 1000)),
        ("mounts", Mount("/", "overlay", False, True, False, False, 64 * MIB, 1000)),
        ("mounts", Mount("/opt/sandbox", "ext4", False, True, True)),
        ("mounts", Mount("/etc", "ext4")),
    ],
)
def test_a_root_that_may_be_written_to_must_be_bounded(name: str, weak: Mount) -> None:
    assert verify_confinement(WRITABLE_SEEN, WRITABLE) == []
    others = tuple(m for m in WRITABLE_SEEN.mounts if m.target != weak.target)
    (problem,) = verify_confinement(replace(WRITABLE_SEEN, mounts=(*others, weak)), WRITABLE)
    assert problem.startswith(f"{name}: ")
    assert name in MEASURE_NAMES


def test_a_read_only_root_is_none_that_may_be_written_to() -> None:
    assert any(p.startswith("root_size: ") for p in verify_confinement(CONFINED, WRITABLE))
    assert any(p.startswith("read_only_root: ") for p in verify_confinement(WRITABLE_SEEN, SPEC))


def test_what_is_written_to_the_root_counts_as_memory() -> None:
    limits = harden(WRITABLE, UIDS, Path("/"))
    assert limits.memory_bytes == SPEC.memory_bytes + 64 * MIB
    assert {place.target for place in limits.tmpfs} == {"/attachments", "/dev/shm", "/run/channel"}
    larger = harden(replace(WRITABLE, storage_bytes=SPEC.memory_bytes + 1), UIDS, Path("/"))
    assert larger.root is not None
    assert (larger.root.on_disk, larger.memory_bytes) == (True, SPEC.memory_bytes)
    assert "or --env.sandbox_storage" in (too_big(WRITABLE, SPEC.memory_bytes + 1, 1) or "")
    assert too_big(SPEC, SPEC.memory_bytes + 1, 1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"root": "writable"},
        {"root": "writable", "storage_bytes": 1},
        {"storage_bytes": 1, "storage_inodes": 1},
        {"layers": ("/x",)},
    ],
)
def test_bounds_and_layers_go_with_a_writable_root_alone(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="writable root"):
        replace(SPEC, **wrong)


def test_what_gvisor_does_not_show_is_not_asked_of_it() -> None:
    seen = replace(CONFINED, no_new_privileges=False, seccomp_mode=0, root_read_only=False)
    spec, bare = replace(SPEC, runtime="runsc"), replace(RUNTIME, no_suid=False, no_dev=False)
    others = tuple(mount for mount in CONFINED.mounts if mount is not RUNTIME)
    assert verify_confinement(replace(seen, mounts=(*others, bare)), spec, untold_by("runsc")) == []
    seen_writable = replace(seen, mounts=(*others, replace(bare, read_only=False)))
    (problem,) = verify_confinement(seen_writable, spec, untold_by("runsc"))
    assert problem.startswith("mounts: /opt/sandbox takes writes")
    assert len(verify_confinement(seen, SPEC, untold_by(None))) == 3
    assert len(verify_confinement(seen, SPEC, untold_by("runc"))) == 3


INFO = {
    "OSType": "linux",
    "MemTotal": 8 << 30,
    "NCPU": 2,
    "MemoryLimit": True,
    "SwapLimit": True,
    "CpuCfsQuota": True,
    "PidsLimit": True,
    "SecurityOptions": ["name=seccomp,profile=default"],
    "Runtimes": {"runc": {}},
    "RuncCommit": {"ID": "v1.3.4-0-gdeadbee"},
}
IMAGE: dict[str, Any] = {"Id": "sha256:1", "Config": {"Volumes": None}}


def test_engine_that_can_enforce_everything_is_fine() -> None:
    assert missing_features(INFO) == []
    assert image_problem(SPEC, INFO, IMAGE) is None
    assert advice(INFO, SPEC, 4) == []


@pytest.mark.parametrize(
    ("measure", "changes"),
    [
        ("memory", {"MemoryLimit": False}),
        ("swap", {"SwapLimit": False}),
        ("cpus", {"CpuCfsQuota": False}),
        ("pids", {"PidsLimit": False}),
        ("seccomp", {"SecurityOptions": []}),
    ],
)
def test_limit_nobody_enforces_is_named(measure: str, changes: dict[str, Any]) -> None:
    (problem,) = missing_features(INFO | changes)
    assert problem.startswith(measure)
    assert missing_features(INFO | changes, frozenset({measure})) == []


@pytest.mark.parametrize(
    ("spec", "info", "image", "cure"),
    [
        (SPEC, INFO, None, "orchestrator image build"),
        (replace(SPEC, image="other:1"), INFO, None, "docker pull other:1"),
        (replace(SPEC, runtime="runsc"), INFO, IMAGE, "docker_runtime"),
        (replace(SPEC, memory_bytes=1 << 40), INFO, IMAGE, "sandbox_memory"),
        (replace(SPEC, cpus=64), INFO, IMAGE, "sandbox_cpus"),
        (SPEC, INFO | {"OSType": "windows"}, IMAGE, "Linux containers"),
    ],
)
def test_what_cannot_be_launched_is_refused_with_what_to_do(
    spec: SandboxSpec, info: dict[str, Any], image: dict[str, Any] | None, cure: str
) -> None:
    problem = engine_problem(info) or image_problem(spec, info, image)
    assert problem is not None
    assert cure in problem
    assert "\n" not in problem


def test_old_runc_and_too_much_memory_in_total_are_said() -> None:
    lines = advice(INFO | {"RuncCommit": {"ID": "1.1.5+ds1-1+deb12u1"}}, SPEC, 16)
    assert [line.split()[0] for line in lines] == ["16", "runc"]


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ("1.1.5+ds1", ["CVE-2024-21626", "CVE-2025-31133"]),
        ("1.1.15+ds1", ["CVE-2025-31133"]),
        ("v1.2.7", ["CVE-2025-31133"]),
        ("1.2.8", []),
        ("1.3.0", ["CVE-2025-31133"]),
        ("1.3.3", []),
        ("1.4.0", []),
        ("2.0.0", []),
        ("unknown", []),
    ],
)
def test_of_an_old_runc_the_holes_that_are_open_are_named(version: str, missing: list[str]) -> None:
    told = old_runc(version)
    assert (told is None) == (not missing)
    assert re.findall(r"CVE-[\d-]+", told or "") == missing


def test_modules_to_preload_are_arguments_and_keep_sandboxes_apart(tmp_path: Path) -> None:
    spec = replace(SPEC, preload=("litellm", "langgraph.graph"))
    assert spec != SPEC
    assert box_of(list(harden(spec, UidPair(1, 2), tmp_path).arguments)).preload == spec.preload
    assert box_of(list(harden(SPEC, UidPair(1, 2), tmp_path).arguments)).preload == ()


def test_pid_1_reads_whom_the_agent_is_to_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    usual = list(harden(WRITABLE, UidPair(1, 2), tmp_path).arguments)
    assert box_of(usual).agent is None
    assert box_of([*usual, *agent_arguments(1000, 5)]).agent == AgentUser(namespace=3, uid=1000, gid=5)
    places = usual[:6]
    for wrong in ([*usual, "--agent-uid", "0"], [*places, *agent_arguments(0, 0)]):
        with pytest.raises(SystemExit):
            box_of(wrong)
    assert "come together or not at all" in capsys.readouterr().err


def test_no_two_sandboxes_have_an_id_in_common() -> None:
    slots = UidSlots(start=0)
    firsts = sorted(slots.take().first_of_range for _ in range(SLOTS))
    assert all(after - before >= 65_536 for before, after in pairwise(firsts))
    assert firsts[0] > LAST_UID
    assert firsts[-1] + 65_536 < 1 << 31
