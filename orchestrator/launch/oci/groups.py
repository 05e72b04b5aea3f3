"""Control groups of a sandbox that no OCI runtime makes: v1, v2, or both together.

Runs in the keeper. Only the standard library is imported.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_CGROUPS = "/sys/fs/cgroup"
# Controllers of v1 whose group a sandbox shares with its parent. They count nothing; a new group of cpuset lets
# nothing run until it is filled in, and a new one of devices allows all.
_COMMON = {"cpuset", "devices"}
_STATE = "state.json"
# What is written to, what is read, and the words for standing still and for going on.
_FREEZER_V1 = ("freezer.state", "freezer.state", "FROZEN", "FROZEN", "THAWED", "THAWED")
_FREEZER_V2 = ("cgroup.freeze", "cgroup.events", "1", "frozen 1", "0", "frozen 0")
_FREEZING_S = 2.0


def make_groups(config: Mapping[str, Any], state: str) -> list[int]:
    """Descriptors of the files that a process writes itself to, one for each hierarchy. `config`: the bundle's.
    `state`: a folder that is made, and keeps what `clear` needs. Raises OSError; then `clear` is due, too."""
    path: str = config["linux"].get("cgroupsPath", "")
    groups = dict(_places(path)) if path else {}
    _remember(state, groups)
    limits = dict(_limits(config["linux"]["resources"]))
    descriptors: list[int] = []
    try:
        for kind, group in groups.items():
            try:
                if not kind:
                    _hand_on(os.path.dirname(group))
                os.mkdir(group)
            except PermissionError:  # for an ordinary user; whoever reads the limits finds that there are none
                continue
            for name, value in limits.items():
                file_name = os.path.join(group, name)
                if os.path.exists(file_name):
                    with open(file_name, "w") as limit:
                        limit.write(value)
            descriptors.append(os.open(os.path.join(group, "cgroup.procs"), os.O_WRONLY | os.O_CLOEXEC))
    except OSError as error:
        for number in descriptors:
            os.close(number)
        raise OSError(error.errno, f"a control group: {error.strerror}") from error
    return descriptors


def _remember(state: str, groups: Mapping[str, str]) -> None:
    """Whole or not at all: nobody could clear what is remembered in part."""
    os.mkdir(state)
    draft = os.path.join(state, "draft")
    try:
        os.chmod(state, 0o777)  # noqa: S103 - in a folder of the orchestrator's user alone, who may be another one
        with open(draft, "w") as file:
            json.dump({"forked": True, "cgroup_paths": groups}, file)
        os.rename(draft, os.path.join(state, _STATE))
    except OSError as error:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        os.rmdir(state)
        raise OSError(
            error.errno, f"no place for what is remembered of it in {state}: {error.strerror}"
        ) from error


def clear(state: str) -> bool:
    """Does what `runc delete` would for a container of which no process is left, and starts no program for it: its
    control groups go, and what is remembered of it in this folder. False: the runtime has to; it is not runc, or
    something is left."""
    file = os.path.join(state, _STATE)
    try:
        with open(file) as text:
            groups = {*json.load(text)["cgroup_paths"].values()}
        for group in groups:
            # runc names groups, too, that an ordinary user's sandbox never had.
            with suppress(FileNotFoundError):
                os.rmdir(group)
        os.unlink(file)  # last but the folder: until then `runc delete` knows the container
        os.rmdir(state)
    except (OSError, ValueError, LookupError):
        return False
    return True


def freeze(state: str, still: bool) -> bool:
    """Has all processes of the groups stand still, or go on. False: they did not in time, or there are none."""
    try:
        with open(os.path.join(state, _STATE)) as text:
            groups = json.load(text)["cgroup_paths"]
        for names in (_FREEZER_V1, _FREEZER_V2):
            for group in groups.values():
                if os.path.exists(file := os.path.join(group, names[0])):
                    told_in = os.path.join(group, names[1])
                    is_done = _frozen(file, told_in, *(names[2:4] if still else names[4:]))
                    if still and not is_done:
                        _frozen(file, told_in, *names[4:])  # what stands half still could not even be killed
                    return is_done
    except (OSError, ValueError, LookupError):
        pass
    return False


def _frozen(file: str, told_in: str, wanted: str, told: str) -> bool:
    with open(file, "w") as text:
        text.write(wanted)
    ends = time.monotonic() + _FREEZING_S
    while True:
        with open(told_in) as text:
            if told in text.read().splitlines():
                return True
        if time.monotonic() > ends:
            return False
        time.sleep(0.001)


def is_forked(state: str) -> bool:
    """Whether no runtime knows the container, because it was forked."""
    try:
        with open(os.path.join(state, _STATE)) as text:
            return bool(json.load(text).get("forked"))
    except (OSError, ValueError, AttributeError):
        return False


def _places(path: str) -> Iterator[tuple[str, str]]:
    """(hierarchy, folder). `path`: of the group, or its name beside that of this process."""
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, kind, own = line.rstrip("\n").split(":", 2)
            if not kind:
                mounted = _CGROUPS if os.path.exists(os.path.join(_CGROUPS, "cgroup.controllers")) else ""
            else:
                mounted = os.path.join(_CGROUPS, kind)
                if kind.startswith("name=") or _COMMON & {*kind.split(",")} or not os.path.isdir(mounted):
                    continue
            if mounted:
                place = path.lstrip("/") if path.startswith("/") else os.path.join(own.lstrip("/"), path)
                yield kind, os.path.join(mounted, place)


def _hand_on(folder: str) -> None:
    """Lets groups of v2 in this folder have the limits that we set, where nobody has let them yet."""
    file = os.path.join(folder, "cgroup.subtree_control")
    with open(file) as text:
        missing = {"cpu", "memory", "pids"}.difference(text.read().split())
    if missing:
        with open(file, "w") as text:
            text.write(" ".join(f"+{name}" for name in sorted(missing)))


def _limits(resources: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(file, what is written to it), of v1 and v2, in the order in which the kernel takes them."""
    if memory := resources.get("memory"):
        yield "memory.limit_in_bytes", str(memory["limit"])
        yield "memory.max", str(memory["limit"])
        if "swap" in memory:
            yield "memory.memsw.limit_in_bytes", str(memory["swap"])
            yield "memory.swap.max", str(memory["swap"] - memory["limit"])
    if cpu := resources.get("cpu"):
        yield "cpu.cfs_period_us", str(cpu["period"])
        yield "cpu.cfs_quota_us", str(cpu["quota"])
        yield "cpu.max", f"{cpu['quota']} {cpu['period']}"
    if pids := resources.get("pids"):
        yield "pids.max", str(pids["limit"])
