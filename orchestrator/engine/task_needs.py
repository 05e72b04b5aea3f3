"""Why a run makes no sandbox as a task wants it."""

import os
from dataclasses import replace

from orchestrator.launch.hardening import too_large
from orchestrator.launch.names import is_path
from orchestrator.launch.oci.machine import lacks_memory, why_not_here
from orchestrator.services.life import spec_of
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.types import SandboxSpec, Task

_OF_A_BOX = (
    "workspace",
    "root",
    "cwd",
    "user",
    "grader",
    "services",
)  # fields that the files of a sandbox give a meaning


def why_unfit(task: Task, env: SandboxSettings, spec: SandboxSpec) -> str | None:
    """None: it makes one. `spec`: of the task's sandboxes."""
    if env.launcher == "process":
        own = [name for name in _OF_A_BOX if getattr(task, name) not in (None, ())]
        return f"its {own[0]} needs a sandbox with files of its own: not --env.launcher process" if own else None
    if task.grader is not None and not spec.is_writable:
        return 'its grader needs a root that can be written to: leave "root" out, or --env.sandbox_root writable'
    if task.steps and (reason := _why_no_steps(env, spec)):
        return reason
    if task.services and (why_alone := _why_no_services(task, env, spec)) is not None:
        return why_alone
    if spec.is_writable and env.launcher != "oci":
        why = "" if env.launcher == "docker" else why_not_here(env.oci_runtime, frozenset(env.waive_hardening))
        if why is not None:
            what = "grader" if task.grader else "workspace" if task.workspace else "root"
            return f"its {what} needs a root that can be written to: --env.launcher oci{why and f': {why}'}"
    if task.image is not None and is_path(task.image) and env.launcher != "oci" and not spec.is_writable:
        return "its image is a file, which only the launcher oci takes (--env.launcher oci)"
    if task.user is not None and not spec.is_writable:
        return 'its user needs a root that can be written to: "root": "writable", or --env.sandbox_root writable'
    if task.memory_bytes is not None and env.cluster == "none" and (why := lacks_memory(spec)) is not None:
        return why
    return too_large(task.attachments, spec.memory_bytes) if task.attachments else None


def _why_no_services(task: Task, env: SandboxSettings, spec: SandboxSpec) -> str | None:
    """None: they can run beside the agent. A rollout's sandboxes have one slot, and together their memory."""
    if env.launcher == "docker" or (env.cluster != "none" and env.launcher != "oci"):
        return "its services run in sandboxes of the launcher oci: --env.launcher oci"
    together = spec.memory_limit_bytes + sum(
        spec_of(service, task, spec).memory_limit_bytes for service in task.services
    )
    if env.cluster == "none" and lacks_memory(replace(spec, memory_bytes=together, storage_bytes=1)):
        return (
            f"it and its {len(task.services)} services may want {together >> 20} MiB, more than this machine has"
        )
    return None


def _why_no_steps(env: SandboxSettings, spec: SandboxSpec) -> str:
    """Empty: several steps can be carried out. Behind each of them the sandbox stands still while it is graded."""
    if env.launcher == "oci" and env.cluster == "none" and os.geteuid() != 0:
        return "its steps need root here: only root's control groups can hold a sandbox still while it is graded"
    if spec.is_on_disk:
        return "its steps need a root in memory: not more env.sandbox_storage than env.sandbox_memory"
    return ""
