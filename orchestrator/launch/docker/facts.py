"""Reads what the Engine says about itself before a run. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.launch.docker.verification import NO_MEASURES
from orchestrator.launch.names import DEFAULT_IMAGE, IMAGE_REPOSITORY
from orchestrator.types import SandboxSpec

# Measure → the field of `docker info` that says whether the Engine can enforce it.
_FEATURES = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpus": "CpuCfsQuota", "pids": "PidsLimit"}
_SAFE_RUNC = (1, 2, 8)  # CVE-2024-21626, CVE-2025-31133, -52565, -52881
_MIB = 1 << 20


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


def image_problem(spec: SandboxSpec, info: Mapping[str, Any], image: Mapping[str, Any] | None) -> str | None:
    """Why this Engine cannot launch `spec`, and what to do; None: it can."""
    if info.get("OSType") != "linux":
        return f"the Docker Engine runs {info.get('OSType')} containers: switch it to Linux containers"
    if image is None:
        cure = (
            "run `orchestrator image build`"
            if spec.image == DEFAULT_IMAGE or spec.image.startswith(f"{IMAGE_REPOSITORY}:")
            else f"run `docker pull {spec.image}`, or build it"
        )
        return f"the sandbox image {spec.image} is not here: {cure}"
    if volumes := (image.get("Config") or {}).get("Volumes"):
        return f"the sandbox image {spec.image} declares volumes ({', '.join(volumes)}): they have no size limit"
    runtimes = info.get("Runtimes") or {}
    if spec.runtime is not None and spec.runtime not in runtimes:
        return (
            f"the Docker Engine has no runtime {spec.runtime!r} (it has {', '.join(sorted(runtimes))}): "
            "register it in /etc/docker/daemon.json, or leave --env.docker_runtime out"
        )
    if spec.memory_bytes > info["MemTotal"]:
        return (
            f"a sandbox of {spec.memory_bytes // _MIB} MiB does not fit into this machine's "
            f"{info['MemTotal'] // _MIB} MiB: lower --env.sandbox_memory"
        )
    if spec.cpus > info["NCPU"]:
        return f"a sandbox of {spec.cpus:g} CPUs does not fit into {info['NCPU']}: lower --env.sandbox_cpus"
    return None


def advice(info: Mapping[str, Any], spec: SandboxSpec, max_sandboxes: int) -> list[str]:
    """Lines that an operator should know and may ignore."""
    lines = []
    if max_sandboxes * spec.memory_bytes > info["MemTotal"]:
        lines.append(
            f"{max_sandboxes} sandboxes of {spec.memory_bytes // _MIB} MiB could together want more than "
            f"the machine's {info['MemTotal'] // _MIB} MiB"
        )
    version = _version((info.get("RuncCommit") or {}).get("ID", ""))
    if version is not None and version < _SAFE_RUNC and spec.runtime in (None, "runc"):
        lines.append(
            f"runc {'.'.join(map(str, version))} is older than its fixes of CVE-2024-21626 and CVE-2025-31133 "
            "(a distribution may have backported them)"
        )
    return lines


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


def _version(text: str) -> tuple[int, ...] | None:
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else None
