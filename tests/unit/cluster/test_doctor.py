"""The doctor at a cluster, without Ray: what it says of each node, and that no node holds it up."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cluster import doctor as cluster_doctor
from orchestrator.cluster import members
from orchestrator.cluster.doctor import check_cluster, check_nodes
from orchestrator.cluster.host import HostActor
from orchestrator.cluster.remote import ListedNode, NodeLost
from orchestrator.commands import doctor as command
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.doctor.finding import Finding, fail, ok
from orchestrator.doctor.host import check_host
from orchestrator.rules.redact import Secret
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from tests.fakes.cluster import FakeCluster, FakeNode
from tests.fakes.inference import Model, ScriptedServer, always
from tests.fakes.odd_engine import OddEngine
from tests.fakes.tokenizer import tokenizer_folder

KEY = Secret("sk-canary-0123456789abcdef")
IMAGE = EnvSettings().sandbox_image


def config(base_url: str = "", **env: Any) -> Config:
    server = OpenAISettings(base_url=base_url, model_name="scripted", api_key=KEY)
    return Config(env=EnvSettings(**{"cluster": "ray", "launcher": "process", **env}), openai=(server,))


async def findings_of(
    cluster: FakeCluster, given: Config | None = None, tokenizer: HubTokenizer | None = None
) -> list[Finding]:
    async with asyncio.timeout(30):
        return [finding async for finding in check_nodes(given or config(), tokenizer, cluster)]


def told(findings: list[Finding], name: str) -> list[tuple[str, str]]:
    return [(found.what, found.level) for found in findings if found.text.startswith(f"node {name}: ")]


async def until_started(cluster: FakeCluster, nodes: int) -> None:
    async with asyncio.timeout(30):
        while len(cluster.started) < nodes:
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------- nodes


async def test_every_node_makes_its_checks_and_is_told_of_by_name() -> None:
    def prepare(node: FakeNode) -> None:
        if node.name == "b":
            node.findings = (ok("docker", "28.0"), fail("endpoint", "no way to it"))

    cluster = FakeCluster("a", "b")
    cluster.prepare = prepare
    findings = await findings_of(cluster)
    assert findings[0] == ok("cluster", "nodes with the resource `sandbox`: a, b")
    assert told(findings, "a") == [("software", "ok"), ("docker", "ok")]
    assert told(findings, "b") == [("software", "ok"), ("docker", "ok"), ("endpoint", "fail")]
    assert fail("endpoint", "node b: no way to it") in findings
    assert all(node.ended for node in cluster.started), "no actor stays"
    (sent, _, _) = cluster["a"].examined[0]
    assert sent.env.cluster == "none", "a node looks at itself"


async def test_nodes_are_looked_at_at_the_same_time() -> None:
    cluster = FakeCluster("a", "b", "c")
    cluster.prepare = lambda node: node.silent.set()
    looking = asyncio.create_task(findings_of(cluster))
    await until_started(cluster, 3)
    for node in cluster.started:
        node.silent.clear()
    assert len(await looking) == 1 + 3 * 2


async def test_a_silent_node_is_a_finding_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(node: FakeNode) -> None:
        if node.name == "a":
            node.silent.set()

    monkeypatch.setattr(cluster_doctor, "NODE_S", 1.5)
    cluster = FakeCluster("a", "b")
    cluster.prepare = prepare
    findings = await findings_of(cluster)
    assert [finding.text.partition(":")[0] for finding in findings[1:]] == ["node b", "node b", "node a"]
    assert told(findings, "a") == [("node", "fail")]
    assert "has not answered for 1.5 s" in findings[-1].text
    assert cluster["a"].ended


async def test_what_a_node_said_before_it_fell_silent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Falling(FakeNode):
        async def examine(
            self, config: Config, *, image_comes: bool, tokenizer_digest: str | None
        ) -> tuple[Finding, ...]:
            self.silent.set()
            return await super().examine(config, image_comes=image_comes, tokenizer_digest=tokenizer_digest)

    class Cluster(FakeCluster):
        async def start(self, node_id: str) -> FakeNode:
            return Falling(node_id)

    monkeypatch.setattr(cluster_doctor, "NODE_S", 1.5)
    assert told(await findings_of(Cluster("a")), "a") == [("software", "ok"), ("node", "fail")]


async def test_a_node_on_which_nothing_starts_is_a_finding() -> None:
    class Cluster(FakeCluster):
        async def start(self, node_id: str) -> FakeNode:
            if node_id == "a":
                raise NodeLost("No module named 'orchestrator'")
            return await super().start(node_id)

    findings = await findings_of(Cluster("a", "b"))
    (lost,) = [finding for finding in findings if finding.level == "fail"]
    assert lost.text.startswith("node a: No module named 'orchestrator'; see `ray status`")
    assert told(findings, "b") == [("software", "ok"), ("docker", "ok")]


async def test_a_node_that_is_to_be_left_is_told_of() -> None:
    cluster = FakeCluster()
    cluster.there["a"] = ListedNode("a", "a", draining=True)
    assert told(await findings_of(cluster), "a")[0] == ("node", "warn")


async def test_a_node_with_other_software_gets_no_key_and_is_asked_no_further() -> None:
    cluster = FakeCluster("a")
    cluster.prepare = lambda node: node.software.update({"python": "3.9.1", "source": "0"})
    findings = await findings_of(cluster)
    assert told(findings, "a") == [("software", "fail")]
    assert "it has python 3.9.1 and not " in findings[-1].text
    assert "source 0 and not " in findings[-1].text
    assert "install the same versions" in findings[-1].text
    assert cluster["a"].examined == []


# ---------------------------------------------------------------- images


@pytest.mark.parametrize(
    ("here", "theirs", "level", "comes", "says"),
    [
        ("sha256:1111", "sha256:1111", "ok", False, "1111, that of"),
        ("sha256:1111", None, "warn", True, "it has no"),
        ("sha256:1111", "sha256:2222", "warn", True, "2222 is another"),
        (None, None, "fail", True, "neither it nor this machine has the image"),
        (None, "sha256:2222", "ok", False, "this machine has none"),
    ],
)
async def test_a_node_s_image_is_compared_with_this_machine_s(
    monkeypatch: pytest.MonkeyPatch, here: str | None, theirs: str | None, level: str, comes: bool, says: str
) -> None:
    monkeypatch.setattr(cluster_doctor, "image_id", {IMAGE: here}.get)
    cluster = FakeCluster("a")
    cluster.prepare = lambda node: node.images.update({IMAGE: theirs} if theirs else {})
    findings = await findings_of(cluster, config(launcher="docker"))
    assert told(findings, "a") == [("software", "ok"), ("image id", level), ("docker", "ok")]
    assert says in findings[2].text
    assert [examined[1] for examined in cluster["a"].examined] == [comes]
    assert cluster["a"].sent_images == []


async def test_nodes_whose_images_differ_are_told_if_this_machine_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_doctor, "image_id", lambda name: None)
    cluster = FakeCluster("a", "b", "c")
    cluster.prepare = lambda node: node.images.update({IMAGE: "sha256:2" if node.name == "c" else "sha256:1"})
    findings = await findings_of(cluster, config(launcher="docker"))
    assert sorted(found.level for found in findings if found.what == "image id") in (
        ["fail", "ok", "ok"],
        ["fail", "fail", "ok"],  # c was first
    )
    assert any("load the same one on both" in finding.text for finding in findings)


@pytest.mark.parametrize("comes", [False, True])
async def test_without_the_image_no_sandbox_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    features = dict.fromkeys(("MemoryLimit", "SwapLimit", "CpuCfsQuota", "PidsLimit"), True)
    info = {**features, "OSType": "linux", "MemTotal": 1 << 40, "NCPU": 64, "SecurityOptions": ["name=seccomp"]}
    async with OddEngine(tmp_path / "engine") as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        engine.answers["/info"] = info | {"DockerRootDir": str(tmp_path / "absent")}
        given = config(launcher="docker", cluster="none")
        findings = [finding async for finding in check_host(given, image_comes=comes)]
    found = {finding.what: finding.level for finding in findings}
    assert found["docker"] == found["limits"] == "ok"
    if comes:
        assert found["sandbox"] == "warn"
        assert "image" not in found
    else:
        assert found["image"] == "fail"
        assert "sandbox" not in found
    assert not any("create" in call for call in engine.asked)


# ---------------------------------------------------------------- on a node


async def test_a_node_finds_what_a_machine_finds_and_nothing_of_a_key_comes_back() -> None:
    model = Model(tokenizer_folder(), "scripted", 32_768)
    async with ScriptedServer("vllm", always("x"), model=model, api_key=KEY.reveal()) as server:
        given = config(server.base_url, cluster="none", tokenizer_name=str(tokenizer_folder()))
        tokenizer = load_tokenizer(str(tokenizer_folder()))
        crossed = pickle.loads(pickle.dumps(given))
        found = await HostActor().examine(crossed, image_comes=False, tokenizer_digest=tokenizer.digest)
        other = await HostActor().examine(crossed, image_comes=False, tokenizer_digest="0" * 64)
    assert pickle.loads(pickle.dumps(found)) == found
    levels = {finding.what: finding.level for finding in found}
    assert levels.pop("files") in ("ok", "warn"), "as much room as this machine has"
    assert levels == {
        "TMPDIR": "ok",
        "sandboxes": "warn",
        "web tools": "warn",
        "tokenizer": "ok",
        "endpoint": "ok",
    }
    assert KEY.reveal().encode() not in pickle.dumps((found, other))
    (wrong,) = [finding for finding in other if finding.what == "tokenizer"]
    assert (wrong.level, "differs from the run's" in wrong.text) == ("fail", True)


async def test_nodes_must_have_the_tokenizer_that_this_machine_loaded() -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    cluster = FakeCluster("a")
    await findings_of(cluster, config("http://127.0.0.1:1/v1"), tokenizer)
    ((sent, _, digest),) = cluster["a"].examined
    assert (sent.env.tokenizer_name, digest) == (tokenizer.name, tokenizer.digest)


# ---------------------------------------------------------------- the cluster


async def test_without_a_node_it_is_said_how_one_is_started() -> None:
    (finding,) = await findings_of(FakeCluster())
    assert (finding.what, finding.level) == ("cluster", "fail")
    assert "has the resource `sandbox`; start nodes with `ray start --resources" in finding.text


async def test_a_head_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeCluster):
        async def nodes(self) -> list[ListedNode]:
            await asyncio.Event().wait()
            return []

    monkeypatch.setattr(members, "LOOKING_S", 0.05)
    (finding,) = await findings_of(Silent("a"))
    assert finding.level == "fail"
    assert "has not answered" in finding.text


async def test_without_ray_the_line_is_that_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "orchestrator.cluster.link", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    (finding,) = [finding async for finding in check_cluster(config(), None)]
    assert (finding.what, finding.level) == ("cluster", "fail")
    assert "pip install 'rollout-orchestrator[ray]'" in finding.text


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("fail", 3)])
@pytest.mark.parametrize("flagged", [True, False])
def test_the_command_looks_at_the_nodes_and_needs_no_docker_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: Any,
    code: int,
    flagged: bool,
) -> None:
    addresses = []

    async def checked(config: Config, tokenizer: HubTokenizer | None) -> AsyncIterator[Finding]:
        addresses.append((config.env.cluster, config.env.ray_address))
        yield Finding(level, "docker", "node a: as it is")

    monkeypatch.setattr(command, "check_cluster", checked)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    env = {"run_dir": tmp_path, "launcher": "docker", "tokenizer_name": "none"}
    if flagged:
        found = command.run(config(cluster="none", **env), "head:6379")
    else:
        found = command.run(config(ray_address="head:6379", **env), None)
    assert found == code
    assert addresses == [("ray", "head:6379")]
    printed = capsys.readouterr().out
    assert [line.split()[1] for line in printed.splitlines()] == [*("output", "keys", "tokenizer", "docker")]
    assert KEY.reveal() not in printed
