"""`orchestrator demo`: `process` on example tasks, with the completions of a recorded run or a local model."""

import asyncio
import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.commands import process
from orchestrator.demo.recording import CODE_BASE, CODE_RECORDING, RECORDING, Recording
from orchestrator.demo.tokenizer import unpack
from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.launch.docker.client import connect, inspect_image
from orchestrator.launch.image.build import ensure_image, is_current
from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.build import ensure_stored
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.launch.oci.store import ImageStore
from orchestrator.run.files import read_run, saved_env
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from orchestrator.settings.tasks import DEMO_TASKS
from orchestrator.terminal.closing import print_wrapped

LOCAL_REQUESTS = 2  # at a time: more only take CPU time from each other
STOP_S = 10.0
ENGINE_TIMEOUT_S = 30
_PR_SET_PDEATHSIG = 1
_RECORDINGS = {"questions": RECORDING, "code": CODE_RECORDING}


def run(config: Config, tasks: str, live: bool) -> int:
    """Returns the exit code of `process`. Raises EnvironmentUnusable where no sandbox can be made, and with `live`
    without a local model; ConfigError where `env.resume` names a run that is not the demo's."""
    recording = Recording.read(_RECORDINGS[tasks])
    if config.env.resume is not None:
        demand_demo(config.env.resume, tasks)
    env = _that_grades(config.env) if tasks == "code" else _with_launcher(config.env)
    print_wrapped(_first_line(recording, live), sys.stdout)
    config = replace(config, env=replace(env, **recording.env, dataset=DEMO_TASKS[tasks]))
    _need_image(config.env)
    if not live:
        server = OpenAISettings(base_url=f"replay:{recording.folder}", model_name=recording.model)
        return process.run(_demo(config, recording, server, str(unpack())))
    with _local_model() as model:
        server = OpenAISettings(base_url=model["base_url"], model_name=model["model_name"])
        env = config.env  # one group at a time, so that the first one ends soon
        env = replace(env, max_concurrent_sandboxes=min(env.max_concurrent_sandboxes, recording.env["group_size"]))
        return process.run(_demo(replace(config, env=env), recording, server, model["tokenizer"]), "demo --live")


def demand_demo(directory: Path, tasks: str) -> None:
    """Raises ConfigError for a run directory that is not the demo's, or has its other tasks."""
    dataset = saved_env(dict(read_run(directory))).get("dataset")
    for other in DEMO_TASKS.keys() - {tasks}:
        if dataset == DEMO_TASKS[other]:
            raise ConfigError(f"env.resume: the run in {directory} plays the {other}: give --tasks {other}")
    if dataset != DEMO_TASKS[tasks]:
        raise ConfigError(
            f"env.resume: the run in {directory} was not made by `orchestrator demo`; continue it with "
            f"`orchestrator process --env.resume {directory}`"
        )


def _first_line(recording: Recording, live: bool) -> str:
    if live:
        return (
            f"demo: all of it is live; {recording.model} runs on this machine's CPU, "
            "which takes minutes for each group (its first start fetches 1.1 GB)"
        )
    graded = recording.env["scoring_strategy"] == "grader"
    live_too = "the tests that grade in other containers" if graded else "tools, scores"
    return (
        f"demo: recorded is what {recording.model} said, token by token, in {recording.rollouts} rollouts of "
        f"{recording.tasks} tasks; live are the containers, the code they run, {live_too} and groups"
    )


def _demo(config: Config, recording: Recording, server: OpenAISettings, tokenizer: str) -> Config:
    """The operator's settings where there is a choice, the recording's elsewhere; no keys, so no web tools."""
    env = replace(
        config.env,
        total_steps=config.env.total_steps if config.env.total_steps > 0 else recording.tasks,
        tokenizer_name=tokenizer,
        token_source="exact",  # noqa: S106 - no password
    )
    return Config(env=env, openai=(server,))


def _with_launcher(env: EnvSettings) -> EnvSettings:
    """With Docker where it answers, else without it where that works. Raises EnvironmentUnusable, ConfigError."""
    if env.launcher == "process":
        raise ConfigError(
            "env.launcher: process puts attachments elsewhere, where the demo's recorded code would not find them"
        )
    notes: list[str] = []
    kind = asyncio.run(launcher_kind(env, notes))
    for note in notes:
        print_wrapped(f"demo: {note}", sys.stdout)
    return replace(env, launcher="oci") if kind == "oci" else env


def _that_grades(env: EnvSettings) -> EnvSettings:
    """With what code tasks need, in place of Docker. Raises EnvironmentUnusable, ConfigError."""
    if env.launcher not in ("auto", "oci"):
        raise ConfigError(f"env.launcher: code tasks need oci, not {env.launcher}")
    if (reason := why_not_here(env.oci_runtime, frozenset(env.waive_hardening))) is not None:
        raise EnvironmentUnusable(f"code tasks need the launcher oci, which does not work here: {reason}")
    images = {CODE_BASE: env.sandbox_image}  # no registry is asked
    return replace(env, launcher="oci", sandbox_root="writable", base_images=images)


def _need_image(env: EnvSettings) -> None:
    """Builds the default image unless it is there as this installation makes it; an image of another name is the
    operator's to build. Raises EnvironmentUnusable."""
    if env.sandbox_image != DEFAULT_IMAGE:
        return
    digest = BuildContext.read(context_root()).digest
    if all(is_current(labels, digest, None) for labels in _labels(env)):
        return
    say = partial(print, file=sys.stderr, flush=True)
    say(f"building the sandbox image {env.sandbox_image}: this once, a few minutes")
    if env.launcher == "oci":
        asyncio.run(ensure_stored(env.sandbox_image, store=ImageStore(), runtime=env.oci_runtime, progress=say))
    else:
        asyncio.run(ensure_image(env.sandbox_image, progress=say))


def _labels(env: EnvSettings) -> Iterator[Mapping[str, str]]:
    """The image's, wherever it has to be; none where it is not there. Raises EnvironmentUnusable."""
    if env.launcher == "oci":
        stored = ImageStore().find(env.sandbox_image)
        yield {} if stored is None else stored.config.get("Labels") or {}
        if not env.base_images:
            return
    try:
        engine = connect(ENGINE_TIMEOUT_S)
    except EnvironmentUnusable:
        if env.launcher == "oci":
            return  # buildah builds the tasks' images on the stored one
        raise
    with closing(engine):
        image = inspect_image(engine, env.sandbox_image)
    yield {} if image is None else (image.get("Config") or {}).get("Labels") or {}


@contextmanager
def _local_model() -> Iterator[dict[str, str]]:
    """Serves the local model and yields where; stopped on any exit, even if this process is killed."""
    command = [sys.executable, "-m", "orchestrator.local_model", "serve"]
    command += ["--port", "0", "--parallel", str(LOCAL_REQUESTS)]
    # The server has a session of its own: Ctrl-C reaches only this process, which lets its rollouts end first.
    server = subprocess.Popen(  # noqa: S603 - our own module
        command, stdout=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent, text=True
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise EnvironmentUnusable(
                "the local model did not start, for the reason above; `orchestrator demo` needs none"
            )
        yield json.loads(line)
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
