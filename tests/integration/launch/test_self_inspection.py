"""Each measure weakened in a real container: the Engine's answer tells, and so does what pid 1 sees."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError

from orchestrator.launch.confinement import verify_confinement
from orchestrator.launch.contents import Contents
from orchestrator.launch.docker.request import create_body
from orchestrator.launch.docker.runtime import engine_runtime
from orchestrator.launch.docker.verification import MEASURES, verify
from orchestrator.launch.hardening import harden
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.uids import UidPair
from orchestrator.proxy import wire
from orchestrator.proxy.wire import CONTRACT
from orchestrator.types import Confinement
from tests.fakes.plans import a_sandbox

pytestmark = pytest.mark.docker

SPEC = a_sandbox(image=DEFAULT_IMAGE)
UIDS = UidPair(20_000, 20_001)
LOOK = f"""
from rollout_api.v1 import sandbox_pb2 as pb
from sandbox.pid1.confinement import confinement
from sandbox.types import Identities
seen = confinement(Identities({UIDS.runner}, {UIDS.worker}, 1))
print(pb.ParkRequest(contract={CONTRACT}, confinement=seen).SerializeToString().hex())
"""
# Measure, what the Engine is asked for instead, and the measures that pid 1 misses then.
WEAKER: list[tuple[str, dict[str, Any], str]] = [
    ("network", {"NetworkMode": "bridge"}, "network"),
    ("read_only_root", {"ReadonlyRootfs": False}, "read_only_root"),
    ("tmpfs", {"Tmpfs": {"/tmp": "size=1g"}}, "tmpfs"),
    ("mounts", {"Binds": ["/tmp:/host"]}, "mounts"),
    ("privileged", {"Privileged": True}, "capabilities"),
    ("capabilities", {"CapAdd": ["SYS_PTRACE"]}, "capabilities"),
    ("capabilities", {"CapDrop": []}, "capabilities"),
    ("no_new_privileges", {"SecurityOpt": ["seccomp=unconfined"]}, "no_new_privileges"),
    ("seccomp", {"SecurityOpt": ["no-new-privileges", "seccomp=unconfined"]}, "seccomp"),
    ("memory", {"Memory": 0, "MemorySwap": 0}, "memory"),
    ("swap", {"MemorySwap": -1}, "swap"),
    ("cpus", {"NanoCpus": 0}, "cpus"),
    ("pids", {"PidsLimit": 0}, "pids"),
    ("ulimits", {"Ulimits": []}, "ulimits"),
    ("terminals", {"Mounts": []}, "terminals"),
    ("namespaces", {"PidMode": "host"}, "namespaces"),
    ("devices", {"Devices": [{"PathOnHost": "/dev/null", "PathInContainer": "/dev/x"}]}, "devices"),
    ("hidden_paths", {"MaskedPaths": []}, "hidden_paths"),
    ("hidden_paths", {"ReadonlyPaths": []}, "hidden_paths"),
    ("oom_kill", {"OomKillDisable": True}, ""),
    ("ipc", {"IpcMode": "private"}, ""),
    ("log_limits", {"LogConfig": {"Type": "json-file", "Config": {}}}, ""),
    ("oom_score", {"OomScoreAdj": 0}, ""),
]


@contextmanager
def container(engine: docker.APIClient, config: dict[str, Any]) -> Iterator[str]:
    made = engine.create_container_from_config(config)["Id"]
    try:
        yield made
    finally:
        engine.remove_container(made, force=True, v=True)


def as_pid_1_sees_it(engine: docker.APIClient, made: str) -> Confinement:
    engine.start(made)
    assert engine.wait(made, timeout=120)["StatusCode"] == 0, engine.logs(made)
    return wire.confinement(bytes.fromhex(engine.logs(made, stderr=False).decode()))


def asked_for(channel: Path, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(
        create_body(SPEC, Contents(engine_runtime(SPEC.image), {}), harden(SPEC, UIDS, channel), {})
    )
    config["HostConfig"] |= changes
    config["NetworkDisabled"] = config["HostConfig"]["NetworkMode"] == "none"
    return config | {"Entrypoint": ["/opt/sandbox/bin/python", "-c", LOOK]}


def test_nothing_is_missing_in_a_container_made_as_asked(engine: docker.APIClient, tmp_path: Path) -> None:
    config = asked_for(tmp_path)
    with container(engine, config) as made:
        assert verify(engine.inspect_container(made), config) == []
        assert verify_confinement(as_pid_1_sees_it(engine, made), SPEC) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes", "missed"), WEAKER)
def test_a_weaker_container_is_refused_by_name(
    engine: docker.APIClient, tmp_path: Path, name: str, changes: dict[str, Any], missed: str
) -> None:
    with container(engine, asked_for(tmp_path, **changes)) as made:
        inspected = engine.inspect_container(made)
        if "OomKillDisable" in changes and not inspected["HostConfig"]["OomKillDisable"]:
            pytest.skip("cgroup v2 has no such switch")
        told = verify(inspected, asked_for(tmp_path))
        assert name in [problem.split()[0] for problem in told]
        if not missed:
            return
        try:
            seen = as_pid_1_sees_it(engine, made)
        except APIError as error:
            pytest.skip(f"this Engine does not even start it: {error.explanation}")
        problems = verify_confinement(seen, SPEC)
        assert missed in [problem.partition(":")[0] for problem in problems], problems
        assert missed not in [
            problem.partition(":")[0] for problem in verify_confinement(seen, SPEC, frozenset({missed}))
        ]


def test_every_measure_is_weakened_here_or_has_no_weaker_form() -> None:
    assert set(MEASURES) - {name for name, _, _ in WEAKER} == {"user", "runtime"}
