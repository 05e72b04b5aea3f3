"""The doctor: what it finds, what it says to do, and that it shows no key and sends no more than the probes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.doctor.finding import Finding
from orchestrator.doctor.machine import check_room, check_run_directory, check_temporary
from orchestrator.doctor.sandboxes import check_sandboxes
from orchestrator.doctor.services import check_keys, check_services, check_web_tools
from orchestrator.host.setup import completion_needs
from orchestrator.launch import channels
from orchestrator.rules.redact import Secret
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.settings.table import EnvSettings
from orchestrator.settings.tools import ToolSettings
from tests.fakes.inference import Fault, Model, ScriptedServer, always
from tests.fakes.runs import place
from tests.fakes.tavily import KEY as TAVILY_KEY
from tests.fakes.tavily import FakeTavily
from tests.fakes.tokenizer import tokenizer_folder

KEY = Secret("sk-canary-0123456789abcdef")


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.what, finding.level) for finding in findings]


async def all_of(findings: AsyncIterator[Finding]) -> list[Finding]:
    return [finding async for finding in findings]


def config(base_url: str = "", tokenizer: str | None = None, **env: Any) -> Config:
    server = OpenAISettings(base_url=base_url, model_name="scripted", api_key=KEY)
    return Config(env=EnvSettings(tokenizer_name=tokenizer, **env), openai=(server,))


def test_room_is_judged_where_the_folder_will_be(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there" / "yet"
    assert check_room("disk", folder, "make room", enough=1, least=1).level == "ok"
    little = check_room("disk", folder, "make room", enough=1 << 62, least=1)
    assert (little.level, "make room" in little.text) == ("warn", True)
    assert check_room("disk", folder, "make room", least=1 << 62).level == "fail"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("inodes", "left", "level", "told"),
    [
        (1_000_000, 900_000, "ok", "GiB free for"),
        (1_000_000, 5_000, "warn", "and 5000 inodes free for"),
        (1_000_000, 0, "fail", "and 0 inodes free for"),
        (0, 0, "ok", "GiB free for"),  # btrfs: there is no such limit
    ],
)
def test_a_disk_without_inodes_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int, left: int, level: str, told: str
) -> None:
    gib = 1 << 20  # in blocks of a kibibyte
    disk = os.statvfs_result((1024, 1024, 9 * gib, 8 * gib, 8 * gib, inodes, left, left, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    finding = check_room("disk", tmp_path, "make room")
    assert finding.level == level
    assert told in finding.text


def test_an_output_folder_that_is_a_file_is_no_place_for_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [finding] = check_run_directory(tmp_path / "file" / "runs")
    assert finding.level == "fail"
    assert "is a file" in finding.text


def test_a_long_tmpdir_is_told_of_and_nothing_is_left_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    [finding] = check_temporary()
    assert (finding.what, finding.level) == ("TMPDIR", "warn")
    assert "too long: sockets go to /tmp" in finding.text
    assert list(long.iterdir()) == []
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr("tempfile.tempdir", None)
    first, second = check_temporary()
    assert (first.level, second.level) == ("warn", "ok")
    assert "absent cannot be written" in first.text


def test_a_tmpdir_where_no_socket_works_fails_with_the_run_s_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with place() as home:
        device = home.stat().st_dev
        (home / "mounts").write_text(f"9 1 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/x rw\n")
        monkeypatch.setattr(channels, "MOUNTS", home / "mounts")
        monkeypatch.setattr("tempfile.tempdir", str(home))
        [finding] = check_temporary()
    assert (finding.what, finding.level) == ("TMPDIR", "fail")
    assert f"{home} is on a network file system (nfs4)" in finding.text


def test_keys_are_named_and_not_shown() -> None:
    hosted = OpenAISettings(base_url="https://user:pass@api.openai.com/v1")
    local = OpenAISettings(base_url="http://localhost:8000/v1", api_key=KEY)
    findings = [
        *check_keys(completion_needs(Config(openai=(local, hosted)))),
        *check_keys(completion_needs(Config())),
    ]
    assert levels(findings) == [("keys", "ok"), ("keys", "fail")]
    assert "set OPENAI_API_KEY" in findings[1].text
    assert KEY.reveal() not in repr(findings)
    assert "pass" not in repr(findings)


async def test_an_endpoint_is_asked_no_more_than_the_probes() -> None:
    model = Model(tokenizer_folder(), "scripted", 32_768)
    async with ScriptedServer("vllm", always("x"), model=model, api_key=KEY.reveal()) as server:
        given = config(server.base_url, str(tokenizer_folder()))
        findings = await all_of(check_services(completion_needs(given)))
        assert levels(findings) == [("tokenizer", "ok"), ("endpoint", "ok")]
        assert "exact token ids" in findings[1].text
        assert 1 <= len(server.log.all) <= 3
        assert all(served.probe for served in server.log.all)
        assert KEY.reveal() not in repr(findings)
        other = config(server.base_url, str(tokenizer_folder(900)))
        findings = await all_of(check_services(completion_needs(other)))
        assert levels(findings) == [("tokenizer", "ok"), ("endpoint", "fail")]
        assert "--env.tokenizer_name" in findings[1].text


async def test_an_endpoint_without_ids_works_with_something_to_know() -> None:
    model = Model(tokenizer_folder(), "scripted", 32_768)
    async with ScriptedServer("openai", always("x"), model=model) as server:
        findings = await all_of(check_services(completion_needs(config(server.base_url, "none"))))
    assert levels(findings) == [("tokenizer", "warn"), ("endpoint", "warn")]
    assert "text only" in findings[1].text


async def test_an_endpoint_is_not_called_text_only_when_only_the_tokenizer_is_missing(tmp_path: Path) -> None:
    model = Model(tokenizer_folder(), "scripted", 32_768)
    async with ScriptedServer("vllm", always("x"), model=model) as server:
        for source in ("auto", "exact"):
            given = config(server.base_url, str(tmp_path / "none"), token_source=source)
            findings = await all_of(check_services(completion_needs(given)))
            assert levels(findings) == [("tokenizer", "fail"), ("endpoint", "warn")]
            assert findings[1].text.endswith("without a tokenizer it was not asked for token ids")


async def test_a_loading_endpoint_is_not_waited_for_and_it_is_said_that_a_run_does() -> None:
    model = Model(tokenizer_folder(), "scripted", 32_768)
    async with ScriptedServer("llamacpp", always("x"), model=model, loading=lambda path: Fault("503")) as server:
        findings = await all_of(check_services(completion_needs(config(server.base_url, str(tokenizer_folder())))))
        assert len(server.log.all) == 1
    assert levels(findings) == [("tokenizer", "ok"), ("endpoint", "fail")]
    assert "does not serve: HTTP 503" in findings[1].text
    assert findings[1].text.endswith("; a run waits 300 s for it")


async def test_what_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    findings = await all_of(check_services(completion_needs(config("http://127.0.0.1:1/v1", "/no/such/folder"))))
    assert levels(findings) == [("tokenizer", "fail"), ("endpoint", "fail")]
    assert "start it or set --openai.base_url" in findings[1].text
    findings = await all_of(check_services(completion_needs(config())))
    assert levels(findings) == [("tokenizer", "warn"), ("endpoint", "warn")]
    findings = await all_of(
        check_services(completion_needs(config(f"replay:{tmp_path}", str(tokenizer_folder()))))
    )
    assert findings[1].level == "fail"
    assert "no recorded run" in findings[1].text
    [finding] = await all_of(check_sandboxes(SandboxSettings(launcher="process"), Config().sandbox_spec()))
    assert finding.level == "warn"


async def test_tavily_is_asked_for_its_usage_and_for_nothing_else() -> None:
    [without] = await all_of(check_web_tools(ToolSettings(), Secret()))
    assert without.level == "warn"
    async with FakeTavily() as service:
        env = EnvSettings(tavily_base_url=service.url)
        [good] = await all_of(check_web_tools(env, Secret(TAVILY_KEY)))
        [bad] = await all_of(check_web_tools(env, Secret("tvly-other-key")))
        assert service.asked == []
    [away] = await all_of(check_web_tools(env, Secret(TAVILY_KEY)))
    assert (good.level, bad.level, away.level) == ("ok", "fail", "fail")
    assert "500 of 15000 credits" in good.text
    assert "check TAVILY_API_KEY" in bad.text
    assert TAVILY_KEY not in repr([good, bad, away])
