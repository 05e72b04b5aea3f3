"""docs/tutorials, page by page: every file is written, every command is run."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from orchestrator.run.lines import texts
from orchestrator.tasks.gaia.download import ANNOTATED
from tests.e2e.endpoint import answers, scripted_endpoint
from tests.e2e.guide import Followed, follow
from tests.fakes import oci_images, ray_cluster
from tests.fakes.hub import FakeHub
from tests.fakes.runs import ROOT, lines
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.trainers import free_port
from tests.integration.test_download_gaia import annotated_tree

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.timeout(900)]

PAGES = ROOT / "docs" / "tutorials"
JOIN = "def join_names(names):\n    return ', '.join(names)\n"  # right for at most one name
SCRIPT = {
    "19 + 23": [[answers("42")], [answers("41")]],
    "6 times 9": [[answers("'fifty-four'")], [answers("42")]],
}


def page(name: str, base_url: str, **replaced: str) -> str:
    text = (PAGES / f"{name}.md").read_text("utf-8")
    for told, here in {
        "http://localhost:9001/v1": base_url,
        "my-model": "scripted",
        "my-tokenizer": str(tokenizer_folder()),
        **replaced,
    }.items():
        text = text.replace(told, here)
    return text


def test_every_page_is_followed_here() -> None:
    named = set(re.findall(r"page\(\"([\w-]+)\"", Path(__file__).read_text()))
    assert {path.stem for path in PAGES.glob("*.md")} == named


def test_sft(home: Path) -> None:
    with scripted_endpoint(SCRIPT) as endpoint, follow(page("sft", endpoint.base_url), home) as followed:
        record = followed.home / "runs" / "sft" / "rollouts.jsonl.zst"
        assert {json.loads(line.text)["score"] == 1.0 for line in texts(record)} == {True, False}
        written = lines(home / "sft" / "train.jsonl")
    assert len(written) == 2
    assert all("messages" in line for line in written)


def test_gaia(home: Path) -> None:
    def hub() -> FakeHub:
        return FakeHub({ANNOTATED: annotated_tree()})

    async def work() -> Followed:
        async with hub() as served:
            served.members = {"hf_member"}
            environ = {"HF_ENDPOINT": served.url, "HF_TOKEN": "hf_member"}
            return await asyncio.to_thread(carried_out, environ)

    def carried_out(environ: dict[str, str]) -> Followed:
        script = {f"What is {n}?": [[answers(str(n))], [answers("0")]] for n in range(1, 5)}
        other = {question: [replies[0]] for question, replies in script.items()}
        with scripted_endpoint(script) as endpoint, scripted_endpoint(other) as better:
            replaced = {"http://localhost:9002/v1": better.base_url, "other-model": "scripted"}
            with follow(page("gaia", endpoint.base_url, **replaced), home, environ) as followed:
                return followed

    followed = asyncio.run(work())
    metrics = json.loads((followed.home / "runs" / "gaia" / "metrics.json").read_text())
    assert len(followed.rollouts("gaia")) == 4 * 4
    assert metrics
    for name in ("runs/look/evaluation.html", "compared.html", "shared.html"):
        assert (followed.home / name).exists()
    told = next(said for command, said in followed.said.items() if "compare" in command)
    assert "4 better, 0 worse" in told, "two models are compared"


def test_own_agent(home: Path) -> None:
    script = {"19 + 23": [["It is more than 40.\n42"], ["I guess.\n41"]]}
    with scripted_endpoint(script) as endpoint, follow(page("own-agent", endpoint.base_url), home) as followed:
        assert {line["answer"] for line in followed.rollouts("agent")} == {"42", "41"}
        assert {line["outcome"] for line in followed.rollouts("agent")} == {"finished"}


@pytest.mark.skipif(oci_images.why_not() is not None, reason=oci_images.why_not() or "")
def test_harbor(home: Path) -> None:
    oci_images.stored_image()
    shutil.copytree(ROOT / "examples", home / "examples")
    fixed = "```bash\nsed -i 's/ - 1//' total.py\n```"
    script = {
        "function `total(prices)`": [[fixed, "Done."], ["It is right as it is."]],
        "function `join_names(names)`": [[f"```bash\ncat > names.py <<'END'\n{JOIN}END\n```", "Done."], ["No."]],
    }
    with scripted_endpoint(script, "--dialect", "vllm", by="seed") as endpoint:
        text = page("harbor", "ENDPOINT", **{"8000": str(free_port())}).replace("ENDPOINT", endpoint.base_url)
        with follow(text, home) as followed:
            assert {line["score"] for line in followed.rollouts("tasks")} <= {0.0, 0.3333, 1.0}
            assert {line["outcome"] for line in followed.rollouts("tasks")} == {"finished"}
            assert len(lines(home / "runs" / "served" / "groups.jsonl")) >= 2
    trials = home / "runs" / "tasks" / "export-harbor"
    assert len(list(trials.rglob("trajectory.json"))) == 8
    assert any(" passed" in said for command, said in followed.said.items() if "check-tasks" in command)


def test_rl(home: Path) -> None:
    shutil.copytree(ROOT / "examples", home / "examples")
    replaced = {"8000": str(free_port()), "8765": "0"}
    script = {" ": [[answers("1")], [answers("2")]]}
    with scripted_endpoint(script, "--dialect", "vllm", by="seed") as endpoint:
        text = page("rl", "ENDPOINT", **replaced).replace("ENDPOINT", endpoint.base_url)
        with follow(text, home) as followed:
            assert len(lines(home / "runs" / "rl" / "groups.jsonl")) >= 4
    assert "live page: http://127.0.0.1:" in (followed.home / "under-way.log").read_text()


@pytest.mark.skipif(ray_cluster.why_not() is not None, reason=ray_cluster.why_not() or "")
def test_cluster(home: Path) -> None:
    with scripted_endpoint(SCRIPT) as endpoint:
        text = page("cluster", endpoint.base_url).replace("6399", str(free_port()))
        with follow(text, home) as followed:
            assert all(line["node"] for line in followed.rollouts("cluster"))
