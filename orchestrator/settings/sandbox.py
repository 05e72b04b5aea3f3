"""Settings of sandboxes: what makes them, where, how many, and what each has."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import ConfigError
from orchestrator.launch.hardening import MEASURE_NAMES
from orchestrator.launch.names import DEFAULT_IMAGE, HOST, is_path
from orchestrator.settings.json_kinds import Listed, Pairs, Words
from orchestrator.settings.kinds import MEBIBYTE, NAME, Choice, Flag, Integer, Number, Size, Text, seconds
from orchestrator.settings.row import AUTO, PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.types import MIN_MEMORY_BYTES, SandboxSpec

_RAY_ADDRESS = re.compile(r"auto|[A-Za-z0-9][\w.-]*:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*|(?:~|\.{1,2})?/[^\n]*")  # a name, or a path
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}", re.ASCII)
_PROGRAM = re.compile(r"[A-Za-z0-9~./][\w.+/ -]*")


@dataclass(frozen=True, kw_only=True, repr=False)
class SandboxSettings(Settings, group="Sandbox", resume=Resume.FREE, commands=(*RUNS, "doctor", *PLAYS)):
    """What makes sandboxes, how many there are, and what each has."""

    max_concurrent_sandboxes: int = row(
        8,
        Integer(1, 10_000),
        "rollouts at a time; each has a sandbox of its own",
        also=("max_concurrent_processes",),
        commands=(*RUNS, "demo", "doctor", *PLAYS, "check-tasks"),
        first_run=RUNS,
    )
    warm_sandboxes: int | None = row(
        None,
        Integer(0, 10_000),
        "sandboxes kept ready on top; auto: up to a quarter of max_concurrent_sandboxes",
        unset=AUTO,
    )
    grading_sandboxes: int | None = row(
        None,
        Integer(0, 10_000),
        "sandboxes on top that grade what rollouts left; 0: each is graded in its rollout's own slot; auto: a "
        "quarter of max_concurrent_sandboxes with scoring_strategy grader, else 0",
        unset=AUTO,
    )
    launcher: Literal["auto", "docker", "oci", "process"] = row(
        "auto",
        Choice(("auto", "docker", "oci", "process")),
        "what makes sandboxes; auto: Docker, or oci where Docker cannot; oci: runc or the like itself, without "
        "Docker; process: no isolation, model-written code runs as you",
        resume=Resume.CONFIRM,
        commands=(*RUNS, "demo", "image check", "doctor", *PLAYS, "cleanup", "check-tasks"),
        first_run=RUNS,
    )
    cluster: Literal["none", "ray"] = row(
        "none",
        Choice(("none", "ray")),
        "where rollouts run; none: on this machine; ray: on nodes of a Ray cluster with the resource `sandbox`",
    )
    ray_address: str = row(
        "auto",
        Text("auto, or HOST:PORT of the head", "ADDRESS", _RAY_ADDRESS.fullmatch),
        "the Ray cluster; auto: the one this machine is a node of",
    )
    sandbox_image: str = row(
        DEFAULT_IMAGE,
        Text("the name of an image, or a path that begins with /, ./ or ~/", "IMAGE", _IMAGE.fullmatch),
        "made by `orchestrator image build`; with oci also what `docker save` wrote, or an OCI layout",
        resume=Resume.CONFIRM,
        commands=(*RUNS, "demo", "image build", "doctor", *PLAYS, "check-tasks"),
        to=(SandboxSpec, "image"),
    )
    sandbox_memory: int = row(
        1 << 30,
        Size(MIN_MEMORY_BYTES),
        "memory, swap included",
        resume=Resume.SIZE,
        commands=(*RUNS, "doctor", *PLAYS, "check-tasks"),
        from_run=PLAYS,
        to=(SandboxSpec, "memory_bytes"),
    )
    sandbox_cpus: float = row(
        1.0,
        Number(at_least=0.01, at_most=1024),
        "CPU cores",
        resume=Resume.SIZE,
        commands=(*RUNS, "doctor", *PLAYS, "check-tasks"),
        from_run=PLAYS,
        to=(SandboxSpec, "cpus"),
    )
    sandbox_pids: int = row(
        128,
        Integer(64, 4_194_304),
        "processes and threads",
        resume=Resume.SIZE,
        commands=(*RUNS, "doctor", *PLAYS, "check-tasks"),
        from_run=PLAYS,
        to=(SandboxSpec, "pids"),
    )
    sandbox_root: Literal["read-only", "writable"] = row(
        "read-only",
        Choice(("read-only", "writable")),
        "the sandbox's file system; writable: agents install and edit what they like, and are root inside, or the "
        "image's USER; needs the launcher oci",
        resume=Resume.CONFIRM,
        from_run=PLAYS,
        to=(SandboxSpec, "root"),
    )
    sandbox_storage: int = row(
        512 * MEBIBYTE,
        Size(MEBIBYTE),
        "what fits into a writable root; it is memory, on top of sandbox_memory; docs/oci.md",
        resume=Resume.SIZE,
        from_run=PLAYS,
        commands=(*RUNS, "doctor", *PLAYS, "check-tasks"),
    )
    dockerfiles: bool = row(
        True,
        Flag(),
        "build tasks' Dockerfiles; false: tasks with one are bad tasks",
        commands=(*RUNS, *PLAYS, "check-tasks"),
    )
    base_images: Mapping[str, str] | None = row(
        None,
        Pairs(Text("the name of an image", "IMAGE", _IMAGE_NAME.fullmatch)),
        "images in the places of those that tasks' Dockerfiles name, like python:3.12-slim=my-base",
        resume=Resume.CONFIRM,
        commands=(*RUNS, *PLAYS, "check-tasks"),
    )
    build_network: Literal["default", "host", "none"] = row(
        "default",
        Choice(("default", "host", "none")),
        "the network of steps in tasks' Dockerfiles; default: the builder's, as with `docker build`",
        resume=Resume.CONFIRM,
        commands=(*RUNS, *PLAYS, "check-tasks"),
    )
    build_timeout: float = row(
        1800.0,
        seconds(above=0),
        "building one task's Dockerfile",
        commands=(*RUNS, *PLAYS, "check-tasks"),
    )
    grader_network: tuple[str, ...] = row(
        (),
        Listed(Text("a host, a host with :PORT, or * for all public ones", "HOST", HOST.fullmatch)),
        "hosts that tests may ask in one dry run on the untouched image, for what they install when they grade; "
        "what they fetched is kept for all later grades, which have no network",
        commands=("check-tasks",),
    )
    docker_runtime: str | None = row(
        None, NAME, "a container runtime Docker knows, like runsc", unset="none: Docker's own"
    )
    oci_runtime: str = row(
        "runc",
        Text("the name or path of a program", "PROGRAM", _PROGRAM.fullmatch),
        "with the launcher oci: the OCI runtime",
        commands=(*RUNS, "demo", "image build", "image check", "doctor", *PLAYS, "check-tasks"),
    )
    start: Literal["run", "fork"] = row(
        "run",
        Choice(("run", "fork")),
        "with the launcher oci: run, the OCI runtime starts each sandbox; fork, they are forked from one that has "
        "everything imported; docs/oci.md",
        commands=(*RUNS, "doctor", *PLAYS, "check-tasks"),
    )
    allow_localhost_tcp: bool = row(
        False,
        Flag(),
        "TCP inside a sandbox, for tasks that start a server; still no network",
        resume=Resume.CONFIRM,
        commands=(*RUNS, "doctor", *PLAYS, "check-tasks"),
    )
    waive_hardening: tuple[str, ...] = row(
        (),
        Words(tuple(sorted(MEASURE_NAMES))),
        "measures not demanded, for an Engine that cannot give them; all others are",
        commands=(*RUNS, "demo", "doctor", *PLAYS, "check-tasks"),
    )
    output_files: int = row(
        64,
        Integer(0, 10_000),
        "most files to keep of those a rollout leaves in output/; 0: none",
        resume=Resume.SIZE,
    )
    output_bytes: int = row(32 * MEBIBYTE, Size(1), "most bytes of these files together", resume=Resume.SIZE)

    @property
    def takes_docker(self) -> bool:
        """Whether Docker makes the run's usual sandboxes, where it answers."""
        needs_oci = self.sandbox_root == "writable" or is_path(self.sandbox_image)
        return self.launcher == "docker" or (self.launcher == "auto" and not needs_oci)

    @property
    def most_warm(self) -> int:
        """How many sandboxes are kept ready in addition to those that rollouts have."""
        return self.max_concurrent_sandboxes // 4 if self.warm_sandboxes is None else self.warm_sandboxes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.launcher == "docker" and is_path(self.sandbox_image):
            raise ConfigError("env.sandbox_image: Docker takes the name of an image; only oci takes files")
        if self.sandbox_root == "writable" and self.launcher in ("docker", "process"):
            raise ConfigError(f"env.sandbox_root: writable needs --env.launcher oci, not {self.launcher}")
        if self.start == "fork" and self.launcher != "oci":
            raise ConfigError(f"env.start: fork needs --env.launcher oci, not {self.launcher}")
        if self.docker_runtime is not None and not self.takes_docker:
            raise ConfigError(
                f"env.docker_runtime: is for the launcher docker, not {self.launcher}; oci takes env.oci_runtime"
            )
