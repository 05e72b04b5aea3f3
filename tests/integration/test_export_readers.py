"""What `orchestrator export` writes, read by those it is for: `datasets`, and TRL's trainers for one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.exporting.formats import FORMATS, TALK
from tests.fakes.recorded_run import write_recorded_run
from tests.fakes.tokenizer import END, tokenizer_folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recorded_run(tmp_path_factory.mktemp("recorded") / "run")


def loaded(run: Path, folder: Path, name: str, *flags: str) -> Any:
    """The data set that `datasets` makes of an export."""
    datasets = pytest.importorskip("datasets")
    assert main(["export", str(run), "--format", name, "--output", str(folder / name), *flags]) == 0
    return datasets.load_dataset(str(folder / name), split="train", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize("name", FORMATS)
def test_datasets_reads_the_columns_that_the_card_names(recorded: Path, tmp_path: Path, name: str) -> None:
    rows = loaded(recorded, tmp_path, name)
    told = json.loads((tmp_path / name / "provenance.json").read_text("utf-8"))
    assert len(rows) == told["rows"] > 0
    for column, kind in FORMATS[name].columns.items():
        feature = rows.features[column]
        if kind == TALK:
            assert {part: value.dtype for part, value in feature.feature.items()} == dict.fromkeys(
                ("role", "content"), "string"
            )
        else:
            whole = kind.removeprefix("list of ")
            assert (feature if whole == kind else feature.feature).dtype == whole
    assert list(rows.features) == list(FORMATS[name].columns)


@pytest.mark.parametrize("name", FORMATS)
def test_the_card_is_one_of_the_hub_s_and_leaves_the_license_to_the_user(
    recorded: Path, tmp_path: Path, name: str
) -> None:
    cards = pytest.importorskip("huggingface_hub")
    assert main(["export", str(recorded), "--format", name, "--output", str(tmp_path / name)]) == 0
    card = cards.DatasetCard.load(tmp_path / name / "README.md")
    (config,) = card.data.configs
    assert all((tmp_path / name / one["path"]).is_file() for one in config["data_files"])
    assert card.data.license is None
    told = json.loads(card.text.partition("```json")[2].partition("```")[0])
    assert told == json.loads((tmp_path / name / "provenance.json").read_text("utf-8"))
    assert told["run"]["models"] == ["scripted"]
    assert (told["run"]["scoring_strategy"], told["run"]["token_ids"]) == ("correctness", "exact")
    count = f"{told['rows']} rows, {told['not_solved']} of them not solved"
    assert count in card.text
    assert bool(told["not_solved"]) == (name in ("trl", "hf"))


def test_the_template_makes_of_messages_what_was_sent_and_sampled(recorded: Path, tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder())
    ids = {row["rollout_id"]: row["input_ids"] for row in loaded(recorded, tmp_path, "sft")}
    talks = {row["rollout_id"]: row["messages"] for row in loaded(recorded, tmp_path, "messages")}
    assert set(ids) < set(talks), "messages also has rollouts without ids"
    for rollout_id, sampled in ids.items():
        text = tokenizer.apply_chat_template(talks[rollout_id], tokenize=False)
        assert text.strip().removesuffix(END) == tokenizer.decode(sampled).removesuffix(END)


def test_both_kinds_of_file_hold_the_same(recorded: Path, tmp_path: Path) -> None:
    lines = {row["rollout_id"]: row for row in loaded(recorded, tmp_path, "trl")}
    parquet = {row["rollout_id"]: row for row in loaded(recorded, tmp_path, "hf")}
    assert set(lines) < set(parquet), "hf also has rollouts without ids"
    for rollout_id, row in lines.items():
        assert row == {name: parquet[rollout_id][name] for name in row}


# ---------------------------------------------------------------- TRL


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "trained"),
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "max_length": None,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
    }


@pytest.mark.trainers
def test_trl_s_sft_trainer_learns_exactly_what_was_sampled(
    recorded: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    trl = pytest.importorskip("trl", reason="needs the package trl")
    import transformers

    from tests.fakes.tiny_model import a_model

    rows = loaded(recorded, tmp_path, "sft", "--threshold", "0.5")
    trainer = trl.SFTTrainer(
        a_model(),
        args=trl.SFTConfig(**settings),
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer_folder()),
    )
    (batch, *_) = trainer.get_train_dataloader()
    known = {tuple(row["input_ids"]): row["labels"] for row in rows}
    assert batch["labels"][0].tolist() == known[tuple(batch["input_ids"][0].tolist())]
    assert trainer.train().training_loss > 0


@pytest.mark.trainers
def test_trl_s_dpo_trainer_takes_the_pairs(recorded: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    trl = pytest.importorskip("trl", reason="needs the package trl")
    import transformers

    from tests.fakes.tiny_model import a_model

    rows = loaded(recorded, tmp_path, "dpo", "--margin", "0.5")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder())
    trainer = trl.DPOTrainer(
        a_model(),
        ref_model=a_model(),
        args=trl.DPOConfig(**settings),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    for made, row in zip(trainer.train_dataset, rows, strict=True):
        for side in ("chosen", "rejected"):
            text = tokenizer.decode(made[f"{side}_ids"])
            assert all(message["content"] in text for message in row[side])
        if row["prompt_ids"]:
            assert made["prompt_ids"] == row["prompt_ids"], "its template makes the ids that were sent"
    assert trainer.train().training_loss == pytest.approx(0.6931, abs=1e-3), "both models are the same"
