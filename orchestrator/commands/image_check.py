"""`orchestrator image check IMAGE`: whether sandboxes can be made from an image.

Any Linux image of this machine's architecture can serve. Checks what the Engine or the store of images tells of
it, and the packages in it. If all is well, starts one sandbox with the whole hardening, which parks only when its
runner and its code worker have solved a rehearsal.
"""

import asyncio
import secrets
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound

from orchestrator.errors import ConfigError, EnvironmentUnusable, ProtocolError, RolloutError
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.host.sandbox import PARK_TIMEOUT_S
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.client import connect, inspect_image, why_refused, why_unreachable
from orchestrator.launch.docker.runtime import never_started
from orchestrator.launch.hardening import NO_MEASURES
from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.image.facts import OLD_PLACES, Fact, image_facts, package_facts, unfit
from orchestrator.launch.make import make_launcher
from orchestrator.launch.names import PACKAGES, is_path
from orchestrator.launch.oci.store import ImageStore
from orchestrator.proxy.server import SandboxServer
from orchestrator.rules.waits import first_of
from orchestrator.settings.config import Config
from orchestrator.types import SandboxExit, SandboxSpec

_ENGINE_TIMEOUT_S = 120
_CURE = "where a sandbox has files of its own, the image may have no links"


def run(config: Config, image: str) -> int:
    """0: the image can serve; 1: it cannot. Raises EnvironmentUnusable, ConfigError."""
    if config.env.launcher == "process":
        raise ConfigError("env.launcher: the launcher process uses no image")
    kind, runtime = asyncio.run(launcher_kind(config.env, [])), config.env.oci_runtime
    if kind == "auto":
        kind = "oci" if is_path(image) else "docker"
    facts = list(_looked_at(image) if kind == "docker" else _looked_at_without_engine(image))
    if not any(fact.cure for fact in facts):
        facts.append(asyncio.run(_started(kind, runtime, _spec(config, image))))
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
            yield from _facts(name, image, partial(_entries, engine, image["Id"]))
    except APIError as error:
        raise EnvironmentUnusable(f"Docker refused: {why_refused(error.explanation or error)}") from None
    except (DockerException, requests.RequestException) as error:
        raise EnvironmentUnusable(why_unreachable(error)) from None


def _facts(
    name: str, image: Mapping[str, Any], entries: Callable[[str], Iterator[tuple[str, int]]]
) -> Iterator[Fact]:
    """`entries`: path and mode of all that the image has below a path."""
    if problem := unfit(name, image):
        raise EnvironmentUnusable(problem)
    yield from image_facts(image, BuildContext.read(context_root()).digest)
    yield from package_facts(entry for place in (PACKAGES, *OLD_PLACES) for entry in entries(place))


def _entries(engine: docker.APIClient, image_id: str, place: str) -> Iterator[tuple[str, int]]:
    container = never_started(engine, image_id)
    try:
        with tempfile.TemporaryFile() as packed:
            packed.writelines(engine.get_archive(container, place)[0])
            packed.seek(0)
            with tarfile.open(fileobj=packed) as tar:
                for entry in tar:
                    kind = stat.S_IFDIR if entry.isdir() else stat.S_IFREG if entry.isfile() else stat.S_IFLNK
                    yield f"{place.rpartition('/')[0]}/{entry.name}", kind | entry.mode
    except NotFound:
        return
    finally:
        engine.remove_container(container, force=True)


def _looked_at_without_engine(name: str) -> Iterator[Fact]:
    store = ImageStore()
    image = store.find(name) or (store.put(Path(name).expanduser()) if is_path(name) else None)
    if image is None:
        raise ConfigError(
            f"there is no image {name} in {store.folder}: `orchestrator image build --oci` makes ours"
        )

    def entries(place: str) -> Iterator[tuple[str, int]]:
        top = image.root / place.lstrip("/")
        for path in (top, *top.rglob("*")):
            with suppress(FileNotFoundError):
                yield f"/{path.relative_to(image.root)}", path.lstat().st_mode

    yield from _facts(name, {"Config": image.config}, entries)


def _spec(config: Config, image: str) -> SandboxSpec:
    """A sandbox of the default size."""
    return replace(Config().sandbox_spec(), image=image, runtime=config.sandbox_spec().runtime)


async def _started(kind: str, runtime: str, spec: SandboxSpec) -> Fact:
    """A sandbox of the default size, started as for a rollout. Raises EnvironmentUnusable."""
    run_id = secrets.token_hex(8)
    launcher = make_launcher(
        kind,
        run_id,
        max_sandboxes=1,
        waived=NO_MEASURES,
        allow_localhost_tcp=False,
        oci_runtime=runtime,
        start="run",
        advise=lambda line: None,
    )
    begun = monotonic()
    try:
        await launcher.check(spec)
        with Channels(run_id) as channels, channels.directory() as directory:
            async with SandboxServer(directory) as server, launcher.launch(spec, directory) as sandbox:
                async with asyncio.timeout(PARK_TIMEOUT_S):
                    parked = await first_of(server.parked(), sandbox.exited())
                if isinstance(parked, SandboxExit):
                    why = f"ended at start: {parked.reason or parked.exit_code}"
                    return Fact("sandbox", why, "it must start as ours does")
                try:
                    launcher.demand_confined(parked, spec)
                except EnvironmentUnusable as error:
                    return Fact(
                        "sandbox",
                        str(error),
                        "as in ours: where a sandbox has its own files, the image may have no links",
                    )
    except TimeoutError:
        return Fact("sandbox", f"not ready within {PARK_TIMEOUT_S:g} s", "see what its start waits for")
    except (RolloutError, ProtocolError) as error:
        return Fact("sandbox", str(error), "see the lines above, and what it prints")
    finally:
        await launcher.aclose()
    return Fact("sandbox", f"started, confined and ready in {monotonic() - begun:.1f} s")
