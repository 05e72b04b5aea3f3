"""A sandbox's CPU time is its own, or unknown."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.launch.cpu_clock import CpuClock
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.sandbox import DockerSandbox
from orchestrator.launch.uids import UidPair
from tests.fakes.odd_engine import OddEngine

ID = "f3fd21dc79e781a37809ae8aa968bded68c1e06df3e225de1110f2d16ada8a31"
PID = 4711
HOST_S, OWN_S = 7684.0, 0.4
USER = "/user.slice/user-1000.slice/user@1000.service/user.slice"


def machine(root: Path, groups: str, own: str | None = None) -> CpuClock:
    """`groups`: /proc/PID/cgroup. Every counter there tells the whole machine's time, that of `own` its own."""
    (root / "proc" / str(PID)).mkdir(parents=True)
    (root / "proc" / str(PID) / "cgroup").write_text(groups)
    for line in groups.splitlines():
        _, names, path = line.split(":", 2)
        mounted = next((name for name in names.split(",") if name == "cpuacct"), names)
        place = root / "cgroup" / mounted
        for folder in (path, *map(str, Path(path).parents)):
            here = place / folder.strip("/")
            here.mkdir(parents=True, exist_ok=True)
            used_s = OWN_S if folder == own else HOST_S
            if not names:
                (here / "cpu.stat").write_text(f"usage_usec {used_s * 1e6:.0f}\nuser_usec 1\n")
            elif mounted == "cpuacct":
                (here / "cpuacct.usage").write_text(f"{used_s * 1e9:.0f}\n")
    return CpuClock.of(PID, ID, 2, proc=root / "proc", cgroups=root / "cgroup")


@pytest.mark.parametrize(
    ("groups", "own"),
    [
        (f"0::/system.slice/docker-{ID}.scope", f"/system.slice/docker-{ID}.scope"),
        (f"0::/docker/{ID}", f"/docker/{ID}"),
        (f"0::{USER}/docker-{ID}.scope", f"{USER}/docker-{ID}.scope"),
        (f"0::/docker/{ID}/init", f"/docker/{ID}"),
        (f"4:memory:/docker/{ID}\n2:cpuacct:/docker/{ID}\n0::/docker/{ID}", f"/docker/{ID}"),
        (f"2:cpu,cpuacct:/docker/{ID}\n1:name=systemd:/docker/{ID}", f"/docker/{ID}"),
    ],
    ids=["systemd", "cgroupfs", "rootless", "groups inside", "hybrid", "v1"],
)
def test_the_container_s_own_group_counts(tmp_path: Path, groups: str, own: str) -> None:
    clock = machine(tmp_path, groups, own)
    assert clock.read_s(10.0) == pytest.approx(OWN_S)


@pytest.mark.parametrize(
    "groups",
    [
        "0::/",
        "0::/../..",
        "0::/system.slice/docker.service",
        f"0::/docker-{ID}.slice/shared.scope",
        f"0::/not{ID}",
        f"4:memory:/docker/{ID}\n2:cpuacct:/",
        f"2:cpuacct,cpu:/user.slice\n1:name=systemd:/docker/{ID}",
        "nothing that makes sense",
        "",
    ],
    ids=["root", "outside", "the Engine's", "a slice", "a longer name", "v1 in part", "v1 systemd", "odd", "none"],
)
def test_without_a_group_of_its_own_nobody_knows(tmp_path: Path, groups: str) -> None:
    if groups.count(":") < 2:
        (tmp_path / "proc" / str(PID)).mkdir(parents=True)
        (tmp_path / "proc" / str(PID) / "cgroup").write_text(groups)
        clock = CpuClock.of(PID, ID, 2, proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")
    else:
        clock = machine(tmp_path, groups)
    assert (clock.read_s(10.0), clock.elsewhere) == (None, False)


@pytest.mark.parametrize("group", [f"/docker/{ID}", f"/../{ID}"])
def test_a_group_out_of_sight_is_the_engine_s_to_read(tmp_path: Path, group: str) -> None:
    (tmp_path / str(PID)).mkdir()
    (tmp_path / str(PID) / "cgroup").write_text(f"0::{group}")
    assert CpuClock.of(PID, ID, 2, proc=tmp_path, cgroups=tmp_path) == CpuClock(None, True, 2)
    assert CpuClock.of(1, ID, 2, proc=tmp_path, cgroups=tmp_path) == CpuClock(None, True, 2)


def test_more_time_than_there_was_is_no_reading(tmp_path: Path) -> None:
    (counter := tmp_path / "cpuacct.usage").write_text("1500000000\n")
    clock = CpuClock(counter, False, 2)
    assert clock.read_s(1.0) == 1.5
    assert clock.read_s(0.5) is None
    counter.write_text("0\n")
    assert clock.read_s(1.0) is None
    counter.write_text("no number\n")
    assert clock.read_s(1.0) is None
    counter.unlink()
    assert clock.read_s(1.0) is None


@pytest.mark.parametrize(("clock", "known"), [(CpuClock(None, True, 2), True), (CpuClock(None, False, 2), False)])
async def test_the_engine_is_asked_only_where_it_may_know_and_not_believed_blindly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: CpuClock, known: bool
) -> None:
    async with OddEngine(tmp_path / "engine") as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        calls = Engine(threads=1)
        await calls.open()
        sandbox = DockerSandbox(calls, UidPair(1, 2), cpu_timeout_s=10.0)
        sandbox.sandbox_id, sandbox.cpu_clock = ID, clock
        sandbox.begun_s = asyncio.get_running_loop().time() - 5.0
        for told_s, believed_s in ((HOST_S, None), (0.0, None), (OWN_S, OWN_S if known else None)):
            engine.answers["/stats"] = {"cpu_stats": {"cpu_usage": {"total_usage": int(told_s * 1e9)}}}
            assert await sandbox.cpu_s() == believed_s
        await calls.aclose()
