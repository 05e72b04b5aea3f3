from __future__ import annotations

import uuid
from collections.abc import Iterator

import docker
import pytest
from docker.utils import kwargs_from_env

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
