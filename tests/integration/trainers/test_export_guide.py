"""What docs/trainers.md says of exported rollouts: the commands as they stand there, and the programs of
examples/exported that they name, on a recorded run and a model with Qwen's chat template."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(1500)]
trl = pytest.importorskip("trl", reason="needs the extra trl")
pytest.importorskip("peft", reason="needs the extra torch")

from tests.e2e.guide import blocks, run  # noqa: E402
from tests.fakes.recorded_run import write_recorded_run  # noqa: E402
from tests.fakes.runs import ROOT, place  # noqa: E402
from tests.fakes.tiny_model import a_model, write  # noqa: E402

GUIDE = ROOT / "docs" / "trainers.md"
SECTION = blocks(GUIDE.read_text("utf-8").partition("## TRL on what `export` wrote")[2].partition("\n## ")[0])
COMMANDS = [command for block in SECTION if block.kind == "sh" for command in block.text.splitlines()]
PROGRAMS = [command.removeprefix("python ") for command in COMMANDS if command.startswith("python ")]
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """With a run, a model, and what the guide's other commands than `python` leave."""
    with place() as home:
        write_recorded_run(home / "runs" / "base")
        folder = write(a_model(), home / "my-model")
        (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
        for command in COMMANDS:
            if not command.startswith("python "):
                run(command, home)
        yield home


def test_every_program_for_exports_is_run_by_the_guide() -> None:
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "exported").glob("*.py")]
    assert sorted(PROGRAMS) == sorted(there)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_model_is_trained(home: Path, program: str) -> None:
    """In this process, as the imports of a trainer take longer than its steps."""
    with chdir(home):
        left = runpy.run_path(str(ROOT / program), run_name="__main__")
    if "args" in left:  # a program of TRL's trainers
        (state,) = Path(home, left["args"].output_dir).glob("checkpoint-2/trainer_state.json")
        assert '"global_step": 2' in state.read_text()
    else:
        assert (home / "out-offline" / "model.safetensors").exists()


def test_of_messages_only_the_answers_are_learned(home: Path) -> None:
    """As docs/trainers.md says of `assistant_only_loss`."""
    import transformers
    from datasets import load_dataset

    rows = load_dataset(str(home / "messages"), split="train", cache_dir=str(home / "cache"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "my-model")
    settings = {"output_dir": str(home / "o"), "use_cpu": True, "bf16": False, "max_length": None}
    args = trl.SFTConfig(**settings, report_to=[], assistant_only_loss=True, per_device_eval_batch_size=1)
    trainer = trl.SFTTrainer(a_model(), args=args, train_dataset=rows, processing_class=tokenizer)
    for batch, row in zip(trainer.get_eval_dataloader(trainer.train_dataset), rows, strict=True):
        learned = tokenizer.decode([label for label in batch["labels"][0].tolist() if label != -100])
        answers = [message["content"].strip() for message in row["messages"] if message["role"] == "assistant"]
        assert [text.strip() for text in learned.split("<|im_end|>")] == [*answers, ""]
