"""Reads what the Engine says about itself before a run. Pure."""

from collections.abc import Mapping
from typing import Any

from orchestrator.launch.fitting import old_runc, too_big, too_many
from orchestrator.launch.hardening import NO_MEASURES
from orchestrator.launch.names import DEFAULT_IMAGE, IMAGE_REPOSITORY
from orchestrator.types import SandboxSpec

# Measure → the field of `docker info` that says whether the Engine can enforce it.
_FEATURES = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpus": "CpuCfsQuota", "pids": "PidsLimit"}


def missing_features(info: Mapping[str, Any], waived: frozenset[str] = NO_MEASURES) -> list[str]:
    """Measures this machine's kernel or Engine cannot enforce, a line each."""
    problems = [
        f"{measure}: the Engine cannot limit it here (docker info: {field} is false)"
        for measure, field in _FEATURES.items()
        if measure not in waived and not info.get(field)
    ]
    options = info.get("SecurityOptions") or ()
    if "seccomp" not in waived and not any("name=seccomp" in option for option in options):
        problems.append("seccomp: the Engine was built, or runs on a kernel, without it")
    return problems


def engine_problem(info: Mapping[str, Any]) -> str | None:
    """Why no sandbox can be confined by what answers as the Docker Engine, and what to do; None: it can.

    Podman 4.3 takes a seccomp profile only as a file of its own machine, and refuses a tmpfs that has an owner or
    a limited number of files ("unknown mount option"). Without these, model-written code could not be kept apart
    from the runner, and could use up the machine's memory with empty files.
    """
    if info.get("OSType") != "linux":
        return f"the Docker Engine runs {info.get('OSType')} containers: switch it to Linux containers"
    if (version := info.get("Podman")) is not None:
        return (
            f"DOCKER_HOST leads to Podman {version}, which cannot limit the files of a sandbox or give its "
            "folders to two users (tmpfs options nr_inodes and uid): use --env.launcher oci, which needs no "
            "engine, or point DOCKER_HOST to a Docker Engine"
        )
    return None


def is_rootless(info: Mapping[str, Any]) -> bool:
    """Whether the Engine runs as an ordinary user."""
    return any("name=rootless" in option for option in info.get("SecurityOptions") or ())


def image_problem(spec: SandboxSpec, info: Mapping[str, Any], image: Mapping[str, Any] | None) -> str | None:
    """Why this Engine cannot launch `spec`, and what to do; None: it can."""
    if image is None:
        cure = (
            "run `orchestrator image build`"
            if spec.image == DEFAULT_IMAGE or spec.image.startswith(f"{IMAGE_REPOSITORY}:")
            else f"run `docker pull {spec.image}`, or build it"
        )
        return f"the sandbox image {spec.image} is not here: {cure}"
    runtimes = info.get("Runtimes") or {}
    if spec.runtime is not None and spec.runtime not in runtimes:
        return (
            f"the Docker Engine has no runtime {spec.runtime!r} (it has {', '.join(sorted(runtimes))}): "
            "register it in /etc/docker/daemon.json, or leave --env.docker_runtime out"
        )
    return too_big(spec, info["MemTotal"], info["NCPU"])


def advice(info: Mapping[str, Any], spec: SandboxSpec, max_sandboxes: int) -> list[str]:
    """Lines that an operator should know and may ignore."""
    runc = (info.get("RuncCommit") or {}).get("ID", "") if spec.runtime in (None, "runc") else ""
    lines = [too_many(spec, max_sandboxes, info["MemTotal"]), old_runc(runc)]
    return [line for line in lines if line is not None]


def describe(info: Mapping[str, Any], image: Mapping[str, Any] | None, spec: SandboxSpec) -> dict[str, str]:
    """Versions and digests for the run's record."""
    facts = {
        "docker": info.get("ServerVersion"),
        "runtime": spec.runtime or info.get("DefaultRuntime"),
        "runc": (info.get("RuncCommit") or {}).get("ID"),
        "kernel": info.get("KernelVersion"),
        "storage_driver": info.get("Driver"),
        "cgroup_version": info.get("CgroupVersion"),
        "image": spec.image,
        "image_id": image["Id"] if image else None,
        "image_digest": next(iter(image.get("RepoDigests") or ()), None) if image else None,
    }
    return {name: str(value) for name, value in facts.items() if value}
