"""`serve` tells Weights & Biases through its real client: what arrives, and what its failures cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.atropos.tracking import Tracking
from tests.fakes.inference import ScriptedServer
from tests.fakes.runs import Ended, answers, flags, running, until, whole_lines
from tests.fakes.trainers import Trainer, run_api
from tests.fakes.wandb_server import WandbServer

pytestmark = pytest.mark.long

TASKS = 4
KEY = "0123456789abcdef" * 2 + "canary00"  # 40 characters


async def _served(home: Path, wandb: WandbServer, *, breaks: bool = False) -> Ended:
    """Three groups, one a step; `breaks`: wandb's server answers 500 once the first group is made."""
    async with run_api() as api, ScriptedServer("vllm", answers(TASKS)) as server:
        given = flags(
            home,
            server.base_url,
            rollout_server_url=api.url,
            total_steps=3,
            max_batches_offpolicy=1,
            use_wandb="true",
            min_items_sent_before_logging=0,
        )
        environ = {
            "WANDB_BASE_URL": wandb.url,
            "WANDB_API_KEY": KEY,
            "WANDB_SILENT": "true",
            "WANDB_FINISH_TIMEOUT": "2",
        }
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*given, directory=home, command="serve", environ=environ) as serve:
            if breaks:
                await until(lambda: whole_lines(home / "run" / "groups.jsonl") > 0 and bool(wandb.runs), "a run")
                wandb.status = 500
            await trainer.take(3, serve)
            ended = await serve.ended()
    assert ended.code == 0, ended.stderr
    assert not ended.traceback, ended.stderr
    assert len(trainer.groups) == 3
    return ended


async def test_metrics_arrive_under_their_names_in_the_trainers_project(home: Path) -> None:
    async with WandbServer().serving() as wandb:
        ended = await _served(home, wandb)
    assert "wandb" not in ended.stderr, "nothing went wrong"
    ((name, told),) = wandb.runs.items()
    assert (told["project"], told["groupName"]) == ("example", "example")
    assert wandb.keys == {KEY}
    assert wandb.ended == {name: 0}
    named = {key: value for line in wandb.history for key, value in line.items()}
    assert 0 <= named["smolagents_0_train/reward_mean"] <= 1
    assert named["smolagents_0_rollout/outcome/finished"] == 1.0
    assert named["smolagents_0_serve/groups_delivered_total"] >= 1
    kept = [path for path in home.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not kept, "the key is in no file"


async def test_server_that_refuses_leaves_the_metrics_here(home: Path) -> None:
    async with WandbServer(status=401).serving() as wandb:
        ended = await _served(home, wandb)
    assert "wandb sync" in ended.stderr
    assert ended.stderr.count("metrics are kept") == 1
    assert list((home / "run" / "wandb").glob("offline-run-*"))
    assert KEY not in ended.stderr + ended.stdout


async def test_server_that_breaks_on_the_way_ends_nothing_and_holds_nothing_up(home: Path) -> None:
    async with WandbServer().serving() as wandb:
        await _served(home, wandb, breaks=True)
    assert wandb.runs


def begin(tracking: Tracking) -> None:
    tracking.open(name="n", project="p", group="g", config={"group_size": 2})


async def test_disabled_and_unwanted_runs_log_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    unwanted = Tracking(False, tmp_path / "off", said.append)
    begin(unwanted)
    unwanted.log({"a": 1}, step=1)
    await unwanted.close()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    disabled = Tracking(True, tmp_path, said.append)
    begin(disabled)
    disabled.log({"a": 1}, step=1)
    await disabled.close()
    assert not said
    assert not (tmp_path / "off").exists()
