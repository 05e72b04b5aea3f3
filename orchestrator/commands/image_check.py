"""`orchestrator image check IMAGE`: whether sandboxes can be made from an image.

Checks what the Engine or the store of images tells of the image, and what is inside. If all is well, starts one
sandbox with the whole hardening, which parks only when its runner and its code worker have solved a rehearsal.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

import docker
import requests
from docker.errors import APIError, DockerException

from orchestrator.errors import ConfigError, EnvironmentUnusable, ProtocolError, RolloutError
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.host.sandbox import PARK_TIMEOUT_S
from orchestrator.launch.channels import Channels
from orchestrator.launch.confinement import untold_by, verify_confinement
from orchestrator.launch.docker.client import connect, inspect_image, why_refused, why_unreachable
from orchestrator.launch.hardening import NO_MEASURES
from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.image.facts import PROBE, PYTHON, Fact, engine_facts, inside_facts
from orchestrator.launch.make import make_launcher
from orchestrator.launch.names import LABEL_OWNER, LABEL_PROJECT, PROJECT, is_path
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.store import ImageStore, StoredImage
from orchestrator.launch.owner import this_process
from orchestrator.proxy.server import SandboxServer
from orchestrator.proxy.wire import CONTRACT
from orchestrator.rules.waits import first_of
from orchestrator.settings.config import Config
from orchestrator.types import SandboxExit, SandboxSpec

_ENGINE_TIMEOUT_S = 120
_NOBODY = "65534:65534"
_FUTURE = "from __future__ import annotations\n"  # must come first in a program
_BECOME_NOBODY = f"{_FUTURE}import os\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"


def run(config: Config, image: str) -> int:
    """0: the image can serve; 1: it cannot. Raises EnvironmentUnusable, ConfigError."""
    if config.env.launcher == "process":
        raise ConfigError("env.launcher: the launcher process uses no image")
    kind, runtime = asyncio.run(launcher_kind(config.env, [])), config.env.oci_runtime
    if kind == "auto":
        kind = "oci" if is_path(image) else "docker"
    facts = list(_looked_at(image) if kind == "docker" else _looked_at_without_engine(image, runtime))
    if not any(fact.cure for fact in facts):
        facts.append(asyncio.run(_started(image, kind, runtime)))
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        print(f"{'WRONG' if fact.cure else 'ok':5}  {fact.name:{width}}  {fact.result}")
        if fact.cure:
            print(f"{'':5}  {'':{width}}  -> {fact.cure}")
    wrong = sum(fact.cure is not None for fact in facts)
    print(f"{image} can serve" if not wrong else f"{image} cannot serve: {wrong} of {len(facts)} checks failed")
    return 1 if wrong else 0


def _looked_at(name: str) -> Iterator[Fact]:
    try:
        with closing(connect(_ENGINE_TIMEOUT_S)) as engine:
            image = inspect_image(engine, name)
            if image is None:
                raise ConfigError(f"there is no image {name} here: build or pull it first")
            yield from engine_facts(image, BuildContext.read(context_root()).digest)
            yield from inside_facts(_probe(engine, image["Id"]), CONTRACT)
    except APIError as error:
        raise EnvironmentUnusable(f"Docker refused: {why_refused(error.explanation or error)}") from None
    except (DockerException, requests.RequestException) as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None


def _probe(engine: docker.APIClient, image_id: str) -> bytes:
    """The output of PROBE in a container, or the Engine's error where it cannot run."""
    container = engine.create_container(
        image_id,
        command=[PROBE.read_text("utf-8")],
        entrypoint=[PYTHON, "-c"],
        user=_NOBODY,
        network_disabled=True,
        labels={LABEL_PROJECT: PROJECT, LABEL_OWNER: str(this_process())},
        host_config=engine.create_host_config(
            network_mode="none", cap_drop=["ALL"], read_only=True, mem_limit="1g", pids_limit=128
        ),
    )["Id"]
    try:
        engine.start(container)
        engine.wait(container, timeout=_ENGINE_TIMEOUT_S)
        return bytes(engine.logs(container, stdout=True, stderr=False) or engine.logs(container, tail=1))
    except APIError as error:
        return str(error.explanation or error).encode()
    finally:
        with suppress(DockerException):
            engine.remove_container(container, force=True, v=True)


def _looked_at_without_engine(name: str, runtime: str) -> Iterator[Fact]:
    store = ImageStore()
    image = store.find(name) or (store.put(Path(name).expanduser()) if is_path(name) else None)
    if image is None:
        raise ConfigError(
            f"there is no image {name} in {store.folder}: `orchestrator image build --oci` makes ours"
        )
    yield from engine_facts({"Config": image.config}, BuildContext.read(context_root()).digest)
    yield from inside_facts(asyncio.run(_probe_without_engine(name, runtime)), CONTRACT)


class _ProbeStore(ImageStore):
    """The store, in which every image runs PROBE, as nobody."""

    def find(self, name: str) -> StoredImage | None:
        image = super().find(name)
        entry_point = [PYTHON, "-c", _BECOME_NOBODY + PROBE.read_text("utf-8").replace(_FUTURE, "")]
        return image and replace(image, config={**image.config, "Entrypoint": entry_point})


async def _probe_without_engine(name: str, runtime: str) -> bytes:
    """The output of PROBE in a sandbox, or the runtime's error where it cannot run. Raises EnvironmentUnusable."""
    spec, run_id = _spec(name), secrets.token_hex(8)
    launcher = OciLauncher(run_id, max_sandboxes=1, runtime=runtime, store=_ProbeStore(), advise=lambda line: None)
    try:
        await launcher.check(spec)
        with Channels(run_id) as channels, channels.directory() as directory:
            async with launcher.launch(spec, directory) as sandbox, asyncio.timeout(_ENGINE_TIMEOUT_S):
                await sandbox.exited()
                return sandbox.last_words.rpartition("\n")[2].encode()
    except (RolloutError, TimeoutError) as error:
        return str(error).encode()
    finally:
        await launcher.aclose()


def _spec(image: str) -> SandboxSpec:
    """A sandbox of the default size."""
    return replace(Config().sandbox_spec(), image=image)


async def _started(name: str, kind: str, runtime: str) -> Fact:
    """A sandbox of the default size, started as for a rollout. Raises EnvironmentUnusable."""
    spec, run_id = _spec(name), secrets.token_hex(8)
    launcher = make_launcher(
        kind,
        run_id,
        max_sandboxes=1,
        waived=NO_MEASURES,
        allow_localhost_tcp=False,
        oci_runtime=runtime,
        advise=lambda line: None,
    )
    begun = monotonic()
    try:
        await launcher.check(spec)
        with Channels(run_id) as channels, channels.directory() as directory:
            async with SandboxServer(directory) as server, launcher.launch(spec, directory) as sandbox:
                async with asyncio.timeout(PARK_TIMEOUT_S):
                    parked = await first_of(server.parked(), sandbox.exited())
    except TimeoutError:
        return Fact("sandbox", f"not ready within {PARK_TIMEOUT_S:g} s", "see what its start waits for")
    except (RolloutError, ProtocolError) as error:
        return Fact("sandbox", str(error), "see the lines above, and what it prints")
    finally:
        await launcher.aclose()
    if isinstance(parked, SandboxExit):
        return Fact(
            "sandbox", f"ended at start: {parked.reason or parked.exit_code}", "it must start as ours does"
        )
    if problems := verify_confinement(parked, spec, untold_by(spec.runtime)):
        return Fact("sandbox", "; ".join(problems), "it must be confined as ours is")
    return Fact("sandbox", f"started, confined and ready in {monotonic() - begun:.1f} s")
