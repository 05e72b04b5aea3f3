"""What parents and sandboxes that are forked have in their bundles in place of what a sandbox has that a runtime
starts. `bundle` has that."""

import json
import re
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.launch.contents import APP, PYTHON, Contents
from orchestrator.launch.hardening import MIB, NO_MEASURES, SUPERVISOR_PIDS, Hardening, harden
from orchestrator.launch.names import CHANNEL_FOLDER, CHANNEL_MOUNT
from orchestrator.launch.oci.bundle import bundle
from orchestrator.launch.oci.call_filter import FILTER, OWNER, encoded
from orchestrator.launch.oci.forking import ROOT
from orchestrator.launch.oci.mounts import PARENT_ROOT
from orchestrator.launch.oci.parent_ids import SHARED_BASE, ParentIds, parent_ids
from orchestrator.launch.oci.runtime import Unfit
from orchestrator.launch.oci.user_namespace import UserNamespace
from orchestrator.launch.oci.writable import agent_arguments
from orchestrator.launch.uids import LAST_UID, UidPair
from orchestrator.types import SandboxSpec

PARENT_BYTES = 2048 * MIB
_ANY = UidPair(LAST_UID - 1, LAST_UID)  # for a parent, whose processes no sandbox reaches
# What the loader, the C library and Python read when a program starts, and a process that is forked from a parent
# cannot have without its pid 1. LD_LIBRARY_PATH is not among them: all of ours know the place of their libraries.
_OF_LIBRARIES = re.compile(r"LD_(?!LIBRARY_PATH$)\w+|GLIBC_TUNABLES|MALLOC_\w+|GCONV_PATH|LOCPATH")
_OF_PYTHON = re.compile(
    r"PYTHON(DEBUG|DEVMODE|DUMPREFS\w*|INSPECT|INTMAXSTRDIGITS|MALLOC|MALLOCSTATS|OPTIMIZE|PERFSUPPORT|PLATLIBDIR"
    r"|PROFILEIMPORTTIME|TRACEMALLOC|VERBOSE|_FROZEN_MODULES|_GIL|_JIT|_PERF_JIT_SUPPORT|_PRESITE)"
)
_UTF_8 = re.compile(r"utf-?8(:.*)?|:.*", re.IGNORECASE)
_CAPABILITIES = ("NET_ADMIN", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN")


class ParentRoot(NamedTuple):
    """The image that a parent has as its root, a folder. `kind`: as in `Parents`. `user`: (uid, gid) of the agents
    of its sandboxes in their user namespace; None: they have none."""

    kind: SandboxSpec
    image: Path
    contents: Contents
    user: tuple[int, int] | None


def write_parent(
    folder: Path,
    control_group: str,
    runtime: str,
    users: UserNamespace | None,
    root: ParentRoot | None,
    unlimited: frozenset[str],
) -> dict[str, Any]:
    """Fills the folder of a parent's bundle. Returns what the keeper must know. `runtime`: as in `Contents`.
    `users`: where an ordinary user runs it. `unlimited`: as in `bundle`. Raises Unfit, OSError."""
    if root is not None and (names := acting_at_start(root.contents.for_programs)):
        raise Unfit(f"variables of its image would act on all that is forked: {', '.join(names[:4])}")
    ids = parent_ids(users)
    base = SHARED_BASE if users is None else folder.parent.parent / "shared"
    told: dict[str, Any] = {"base": str(base), "maps": ids.maps, "owner": ids.owner, "shifts": ids.shifts}
    if users is not None:
        base.mkdir(exist_ok=True)  # the keeper is another user
    config = parent_bundle(runtime, control_group, ids, base, rooted=root is not None, unlimited=unlimited)
    (folder / "config.json").write_text(json.dumps(config))
    if root is not None:
        hardening, importing = harden(root.kind, _ANY, folder), (_ANY.worker, _ANY.worker)
        if root.user is not None:
            uid, gid = root.user
            hardening = replace(hardening, arguments=(*hardening.arguments, *agent_arguments(uid, gid)))
            importing = (ids.first_agent + uid, ids.first_agent + gid)
        config = bundle(root.image, root.contents, hardening, control_group, unlimited=unlimited)
        (folder / ROOT).write_text(json.dumps(template_config(config, importing)))
        told["image"] = str(root.image)
    return told


def acting_at_start(environment: Mapping[str, str]) -> list[str]:
    """Names of the variables by which an image changes, or has do something, whatever Python is started with them:
    that of a parent, which is root, is pid 1 of all that is forked from it."""

    def is_acting(name: str, value: str) -> bool:
        match name:
            case "PYTHONWARNINGS":  # a category has its module imported
                return any("." in part for rule in value.split(",") for part in rule.split(":")[2:3])
            case "PYTHONIOENCODING":
                return not _UTF_8.fullmatch(value)
            case "PYTHONUTF8" | "PYTHONCOERCECLOCALE":
                return value == "0"
        return bool(_OF_LIBRARIES.fullmatch(name) or _OF_PYTHON.fullmatch(name))

    return sorted(name for name, value in environment.items() if value and is_acting(name, value))


def parent_bundle(
    runtime: str,
    control_group: str,
    ids: ParentIds,
    base: Path,
    *,
    rooted: bool = False,
    unlimited: frozenset[str] = NO_MEASURES,
) -> dict[str, Any]:
    """The configuration of a parent's container: a sandbox's without all that is of a task, and with what it takes
    to make others. `base`: as in `Forking.make_parent`. `rooted`: it will have an image as its root. `unlimited`:
    as in `bundle`."""
    nowhere, contents = Path("/"), Contents(runtime, {})
    limits = Hardening((), nowhere, (), PARENT_BYTES, 0, 4 * SUPERVISOR_PIDS, {}, False, None, 0)
    config = bundle(base / PARENT_ROOT, contents, limits, control_group, unlimited=unlimited)
    process, linux = config["process"], config["linux"]
    process["args"] = [PYTHON, "-P", f"{APP}/sandbox/boot/parent.py", *(["--rooted"] if rooted else [])]
    capabilities = [f"CAP_{name}" for name in _CAPABILITIES]
    process["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), capabilities)
    config["mounts"] = [told for told in config["mounts"] if told["destination"] != CHANNEL_MOUNT]
    linux["namespaces"].append({"type": "user"})
    linux["uidMappings"], linux["gidMappings"] = ids.users, ids.groups
    linux["resources"].pop("cpu", None)
    # A process that mounts a /proc of its own must see the whole of one.
    linux["maskedPaths"] = linux["readonlyPaths"] = []
    del linux["seccomp"]
    return config


def template_config(config: dict[str, Any], user: tuple[int, int]) -> dict[str, Any]:
    """What a template takes of the configuration of a sandbox, to import modules as that would. `user`: as whom,
    (uid, gid)."""
    without = ("/sys/fs/cgroup", CHANNEL_FOLDER, CHANNEL_MOUNT)
    mounts = [told for told in config["mounts"] if told["destination"] not in without]
    process = {**config["process"], "user": dict(zip(("uid", "gid"), user, strict=True))}
    return {**config, "mounts": mounts, "process": process}


def fork_config(config: dict[str, Any], uids: UidPair, sharers: int) -> dict[str, Any]:
    """The configuration of a sandbox, with what a runtime would find out itself. `sharers`: as in
    `Forking.make_parent`. Raises EnvironmentUnusable."""
    process, linux, notes = config["process"], config["linux"], {OWNER: str(uids.runner)}
    # The kernel counts signals that wait for all users of a user namespace together.
    most = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
    if most != resource.RLIM_INFINITY:
        most = max(1, most // sharers)
        limit = {"type": "RLIMIT_SIGPENDING", "soft": most, "hard": most}
        process = {**process, "rlimits": [*process["rlimits"], limit]}
    if "seccomp" in linux:
        notes[FILTER] = encoded(linux["seccomp"])
    return {**config, "process": process, "annotations": notes}
