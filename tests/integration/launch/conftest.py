from __future__ import annotations

import uuid
from collections.abc import Iterator

import docker
import pytest
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from orchestrator.launch.names import DEFAULT_IMAGE
from tests.integration.launch.probes import probe_image


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.APIClient]:
    client = docker.APIClient(**kwargs_from_env())
    yield client
    client.close()


@pytest.fixture(scope="session")
def probe(engine: docker.APIClient) -> Iterator[str]:
    with probe_image(engine) as image:
        yield image


@pytest.fixture
def run() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def runsc(engine: docker.APIClient) -> str:
    """The name of gVisor's runtime, where this Engine has it and it starts containers here."""
    if "runsc" not in engine.info()["Runtimes"]:
        pytest.skip("this Engine has no runsc: register it as SECURITY.md says")
    made = engine.create_container(
        DEFAULT_IMAGE,
        entrypoint=["/bin/true"],
        host_config=engine.create_host_config(runtime="runsc", network_mode="none"),
    )["Id"]
    try:
        engine.start(made)
        ended = engine.wait(made, timeout=120)["StatusCode"]
    except (DockerException, OSError) as error:
        pytest.skip(f"this Engine's runsc starts nothing here: {error}")
    finally:
        engine.remove_container(made, force=True)
    if ended != 0:
        pytest.skip(f"this Engine's runsc ends /bin/true with {ended}")
    return "runsc"
