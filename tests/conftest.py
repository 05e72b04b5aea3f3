"""The folder of a test that runs commands; how many examples a property is tried with: few in `make test`, many in
`make test-long`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings


@pytest.fixture(scope="session", autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes pytest's folder before a test moves TMPDIR to a folder that ends with it."""
    tmp_path_factory.getbasetemp()


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of a test's runs. Its tasks.jsonl has as many tasks as the module's TASKS says."""
    from tests.fakes.runs import place, write_tasks  # here, as few unit tests need what it imports

    with place() as folder:
        if tasks := getattr(request.module, "TASKS", 0):
            write_tasks(folder / "tasks.jsonl", tasks)
        yield folder


settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("quick")
