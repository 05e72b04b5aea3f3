"""No proxy of whoever runs the tests is on the way."""

import pytest


@pytest.fixture(autouse=True)
def no_operators_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
