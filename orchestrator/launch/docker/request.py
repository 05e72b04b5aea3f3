"""The confinement of a sandbox as it is asked of the Engine. Pure. `verification` compares it with what the Engine
did."""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from posixpath import commonpath, normpath
from typing import Any

from orchestrator.errors import ImageUnusable
from orchestrator.launch.contents import ENVIRONMENT, Contents, image_environment
from orchestrator.launch.hardening import (
    CAPABILITIES,
    CHANNEL_PLACE,
    HOST_NAME,
    MASKED_PATHS,
    NO_MEASURES,
    OOM_SCORE,
    READ_ONLY_PATHS,
    TERMINALS_MOUNT,
    TERMINALS_OPTIONS,
    Hardening,
    seccomp_profile,
    writable_places,
)
from orchestrator.launch.image.facts import unfit
from orchestrator.launch.names import CHANNEL_MOUNT, LABEL_PROJECT, PROJECT, RUNTIME_MOUNT, is_gvisor
from orchestrator.launch.uids import UidPair
from orchestrator.types import MIN_MEMORY_BYTES, SandboxSpec

VOLUME = "orchestrator-"  # how the names of our volumes begin, and of containers that hold one
_TMPFS = [place.target for place in (*writable_places(MIN_MEMORY_BYTES, UidPair(0, 0)), CHANNEL_PLACE)]
_OURS = ("/proc", "/dev", "/sys", RUNTIME_MOUNT, *_TMPFS)


def create_body(
    spec: SandboxSpec,
    contents: Contents,
    hardening: Hardening,
    labels: Mapping[str, str],
    waived: frozenset[str] = NO_MEASURES,
) -> dict[str, Any]:
    """The body of the Engine's create call."""
    local_tcp = hardening.allow_localhost_tcp
    # gVisor keeps terminals of its own, which do not count on the machine.
    gvisor = spec.runtime is not None and is_gvisor(spec.runtime)
    own_terminals = "terminals" in waived or gvisor
    return {
        "Image": spec.image,
        "Entrypoint": list(contents.command),
        "Cmd": list(hardening.arguments),
        # A name without a value takes the image's variable away.
        "Env": [
            *(f"{name}={value}" for name, value in ENVIRONMENT.items()),
            *contents.environment.keys() - ENVIRONMENT,
        ],
        "WorkingDir": "/",
        "User": "0:0",
        "Hostname": HOST_NAME,
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        # If networking is not disabled, the Engine joins the container to the network "none". It runs itself twice
        # for that, half the CPU of a bare start, and mounts the host's name servers. But it also mounts the file
        # that says what `localhost` is, which local TCP needs.
        "NetworkDisabled": not local_tcp,
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "Tmpfs": {place.target: ",".join(place.options) for place in hardening.tmpfs},
            "Mounts": [
                {"Type": "bind", "Source": str(hardening.channel), "Target": CHANNEL_MOUNT, "ReadOnly": True},
                _runtime(contents.runtime, gvisor=gvisor),
                *(_volume(place, name) for place, name in contents.volumes.items()),
                *([] if own_terminals else [_terminals()]),
            ],
            "CapDrop": ["ALL"],
            "CapAdd": list(CAPABILITIES),
            "SecurityOpt": ["no-new-privileges", f"seccomp={_profile_text(allow_localhost_tcp=local_tcp)}"],
            "Memory": hardening.memory_bytes,
            "MemorySwap": hardening.memory_bytes,
            "NanoCpus": round(hardening.cpus * 1e9),
            "PidsLimit": hardening.pids,
            "Ulimits": [{"Name": name, "Soft": most, "Hard": most} for name, most in hardening.ulimits.items()],
            "OomScoreAdj": OOM_SCORE,
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "MaskedPaths": list(MASKED_PATHS),
            "ReadonlyPaths": list(READ_ONLY_PATHS),
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            "Init": False,  # our own pid 1 reaps children
            **({"Runtime": spec.runtime} if spec.runtime else {}),
        },
    }


def runtime_volume(runtime: str) -> str:
    """The name of the volume that mounts the folder `runtime` of the Engine's machine."""
    return f"{VOLUME}runtime-{sha256(runtime.encode()).hexdigest()[:16]}"


def _runtime(runtime: str, *, gvisor: bool) -> dict[str, Any]:
    """A volume, made with the first sandbox, as a bind mount of the Engine's can be neither nosuid nor nodev. It
    is read-only by its own options: a second "ReadOnly" would undo the others. gVisor sees only that one."""
    how = {"type": "none", "device": runtime, "o": "bind,ro,nosuid,nodev"}
    driver = {
        "NoCopy": True,
        "Labels": {LABEL_PROJECT: PROJECT},
        "DriverConfig": {"Name": "local", "Options": how},
    }
    name = runtime_volume(runtime)
    return {"Type": "volume", "Source": name, "Target": RUNTIME_MOUNT, "ReadOnly": gvisor, "VolumeOptions": driver}


def used_of_image(image: str, inspected: Mapping[str, Any]) -> tuple[str, dict[str, str], dict[str, str]]:
    """(id, environment, volumes by their places) of an image, as an Engine describes it. Raises ImageUnusable."""
    if problem := unfit(image, inspected):
        raise ImageUnusable(problem)
    image_id, config = str(inspected["Id"]), inspected.get("Config") or {}
    environment = image_environment(image, config.get("Env") or ())
    return image_id, environment, image_volumes(image, image_id, config.get("Volumes") or ())


def image_volumes(image: str, image_id: str, declared: Iterable[str]) -> dict[str, str]:
    """A volume for each VOLUME of an image, by its place: one for all sandboxes, filled by the Engine with what is
    there in the image, and read-only. By itself the Engine would make volumes without a limit. Raises
    ImageUnusable: one would lie over a place of ours."""
    volumes = {}
    for place in {normpath(f"/{place.lstrip('/')}") for place in declared} - set(_TMPFS):
        if any(commonpath((place, ours)) in (place, ours) for ours in _OURS):
            raise ImageUnusable(f"the image {image} has a VOLUME {place}, where sandboxes have their own files")
        volumes[place] = f"{VOLUME}image-{sha256(f'{image_id}{place}'.encode()).hexdigest()[:16]}"
    return volumes


def _volume(place: str, name: str) -> dict[str, Any]:
    options = {"Labels": {LABEL_PROJECT: PROJECT}}
    return {"Type": "volume", "Source": name, "Target": place, "ReadOnly": True, "VolumeOptions": options}


def _terminals() -> dict[str, Any]:
    """A file system of pseudo-terminals with a limit, as a volume that is removed with the container. That which
    the Engine mounts by itself has no limit."""
    how = {"type": "devpts", "device": "devpts", "o": ",".join(TERMINALS_OPTIONS)}
    driver = {"NoCopy": True, "DriverConfig": {"Name": "local", "Options": how}}
    return {"Type": "volume", "Target": TERMINALS_MOUNT, "ReadOnly": False, "VolumeOptions": driver}


@lru_cache
def _profile_text(*, allow_localhost_tcp: bool) -> str:
    return json.dumps(seccomp_profile(allow_localhost_tcp=allow_localhost_tcp), separators=(",", ":"))
