"""How many examples a property is tried with: few in `make test`, many in `make test-long`."""

import pytest
from hypothesis import settings


@pytest.fixture(scope="session", autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes pytest's folder before a test moves TMPDIR to a folder that ends with it."""
    tmp_path_factory.getbasetemp()


settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("quick")
