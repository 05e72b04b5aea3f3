"""The folder of a test that runs commands; how many examples a property is tried with: few in `make test`, many in
`make test-long`."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

LONGEST_TMPDIR = 40  # bytes: a socket's path, with a test's folder and a sandbox's in it, may have about 100


def pytest_configure() -> None:
    """Tests go to /tmp where TMPDIR is too long for the sockets in it, as the product itself does."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """TMPDIR as it is before a test moves it to a folder that ends with the test; pytest's own is made in it."""
    tmp_path_factory.getbasetemp()
    return tempfile.gettempdir()


gc.disable()  # until all is collected: each round would look at everything that there is by then


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # at Python's own, a twelfth of the time of unit tests was for it
    gc.enable()


@pytest.fixture
def tmp_path(temporary_folder: str) -> Iterator[Path]:
    """As pytest's own, but with a path so short that sockets fit below it, with xdist too."""
    with tempfile.TemporaryDirectory(prefix="t", dir=temporary_folder, ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The folder of a test's runs. Its tasks.jsonl has as many tasks as the module's TASKS says."""
    from tests.fakes.runs import place, write_tasks  # here, as few unit tests need what it imports

    with place() as folder:
        if tasks := getattr(request.module, "TASKS", 0):
            write_tasks(folder / "tasks.jsonl", tasks)
        yield folder


settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)
settings.load_profile("quick")
