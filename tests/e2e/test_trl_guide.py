"""The program of docs/trainers.md that trains with TRL: checked by mypy, and run as it stands there, with
containers and a server that loads the weights which the program saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.trainers, pytest.mark.docker, pytest.mark.timeout(900)]
pytest.importorskip("trl", reason="needs the extra trl")
pytest.importorskip("peft", reason="needs the extra torch")
pytest.importorskip("gguf", reason="needs the extra torch")

from tests.e2e.guide import blocks  # noqa: E402
from tests.e2e.test_library_guide import mypy, run  # noqa: E402
from tests.fakes.inference import Call  # noqa: E402
from tests.fakes.policy_server import PolicyServer, serving  # noqa: E402
from tests.fakes.runs import ROOT, lines, place  # noqa: E402
from tests.fakes.tiny_model import a_model, write  # noqa: E402

GUIDE = ROOT / "docs" / "trainers.md"


def script(call: Call) -> str:
    """Right or wrong, by the rollout's seed."""
    right = "42" if "17 plus 25" in call.task else "48"
    return f"Thought: so.\n<code>\nfinal_answer({right if (call.seed or 0) % 2 else -1})\n</code>"


@dataclass(frozen=True, slots=True)
class Followed:
    """What the guide left."""

    home: Path
    said: dict[str, str]
    server: PolicyServer


@pytest.fixture(scope="module")
def followed() -> Iterator[Followed]:
    with serving("sglang", a_model(), script) as server, place() as home:
        folder = write(a_model(), home / "my-model")
        text = GUIDE.read_text("utf-8").replace("http://localhost:30000", server.url)
        text = text.replace('"my-model"', f'"{folder}"')
        said = {}
        for block in blocks(text):
            if block.name == "train_trl.py":
                (home / "train_trl.py").write_text(block.text, "utf-8")
            elif "train_trl.py" in block.text:
                for command in block.text.splitlines():
                    said[command] = run(command, home)
        yield Followed(home, said, server)


def test_it_trains_by_the_guide(followed: Followed) -> None:
    assert list(followed.said) == ["python train_trl.py", "orchestrator verify runs/trl"]
    assert (followed.home / "trained" / "model.safetensors").stat().st_size > 0
    assert followed.server.updates == 2
    recorded = lines(followed.home / "runs" / "trl" / "rollouts.jsonl")
    assert [line["outcome"] for line in recorded] == ["finished"] * 8
    versions = [completion["policy_version"] for line in recorded for completion in line["completions"]]
    assert sorted(set(versions)) == ["0", "1"]
    assert "runs/trl" in followed.said["orchestrator verify runs/trl"]


def test_the_program_is_typed(followed: Followed) -> None:
    errors = mypy(followed.home, "train_trl.py")
    assert [line for line in errors if "orchestrator" in line] == []
