"""Which Engine is meant: DOCKER_HOST, else the context, as Docker's own client has it."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import connect
from orchestrator.launch.docker.context import engine_address

VARIABLES = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DOCKER_CONFIG, with the contexts `rootless` and `far`, in the form in which Docker's client writes them."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name, engine in (
        ("rootless", {"Host": "unix:///run/user/1000/docker.sock", "SkipTLSVerify": False}),
        ("far", {"Host": "tcp://far:2376", "SkipTLSVerify": False}),
        ("ssh", {"Host": "ssh://me@far", "SkipTLSVerify": False}),
    ):
        key = sha256(name.encode()).hexdigest()
        meta = tmp_path / "contexts" / "meta" / key
        meta.mkdir(parents=True)
        told = {"Name": name, "Metadata": {}, "Endpoints": {"docker": engine}}
        (meta / "meta.json").write_text(json.dumps(told))
    tls = tmp_path / "contexts" / "tls" / sha256(b"far").hexdigest() / "docker"
    tls.mkdir(parents=True)
    for part in ("ca", "cert", "key"):
        (tls / f"{part}.pem").write_text("")
    return tmp_path


def current(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps({"currentContext": name}))


def test_the_current_context_is_asked(folder: Path) -> None:
    assert "base_url" not in engine_address(), "Docker's usual socket"
    current(folder, "rootless")
    assert engine_address() == {"base_url": "unix:///run/user/1000/docker.sock"}
    current(folder, "default")
    assert "base_url" not in engine_address()
    current(folder, "ssh")
    assert engine_address() == {"base_url": "ssh://me@far", "use_ssh_client": True}


@pytest.mark.parametrize("written", ["[]", "7", '{"currentContext": 7}', '{"currentContext": ""}', "{}"])
def test_a_configuration_that_names_no_context_means_the_usual_engine(folder: Path, written: str) -> None:
    (folder / "config.json").write_text(written)
    assert "base_url" not in engine_address()


def test_variables_win_over_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current(folder, "rootless")
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    assert engine_address()["base_url"] == "tcp://far:2376"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert "base_url" not in engine_address()
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    monkeypatch.setenv("DOCKER_HOST", "unix:///other.sock")
    assert engine_address()["base_url"] == "unix:///other.sock"


def test_a_context_brings_its_certificates(folder: Path) -> None:
    current(folder, "far")
    tls = engine_address()["tls"]
    place = folder / "contexts" / "tls" / sha256(b"far").hexdigest() / "docker"
    assert tls.ca_cert == str(place / "ca.pem")
    assert tls.cert == (str(place / "cert.pem"), str(place / "key.pem"))
    assert tls.verify is True


def test_certificates_of_docker_host_are_looked_for_in_dockers_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("ca", "cert", "key"):
        (folder / f"{part}.pem").write_text("")
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2376")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    assert engine_address()["tls"].ca_cert == str(folder / "ca.pem")


@pytest.mark.parametrize("written", ["{", "[]", '{"Endpoints": {}}', None])
def test_a_context_that_cannot_be_used_is_named(folder: Path, written: str | None) -> None:
    current(folder, "broken")
    if written is not None:
        meta = folder / "contexts" / "meta" / sha256(b"broken").hexdigest()
        meta.mkdir()
        (meta / "meta.json").write_text(written)
    with pytest.raises(EnvironmentUnusable, match="the Docker context 'broken'"):
        connect(5)
