"""`orchestrator verify --model`: a run of `process` on a server that samples from a small real model, compared
with it; then the same run as faulty servers would have told it.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trainers
torch = pytest.importorskip("torch", reason="needs the extra torch")
pytest.importorskip("peft", reason="needs the extra torch")
pytest.importorskip("gguf", reason="needs the extra torch")

from orchestrator.cli import main  # noqa: E402
from orchestrator.forward.compare import LIMITS, Comparison, Precision  # noqa: E402
from orchestrator.forward.lines import Place, TrainedLine  # noqa: E402
from orchestrator.forward.model import Model  # noqa: E402
from tests.fakes.inference import Call  # noqa: E402
from tests.fakes.model_server import ModelServer  # noqa: E402
from tests.fakes.runs import flags, lines, place, run, write_tasks  # noqa: E402
from tests.fakes.tiny_model import a_model, merged, trained_on, write, write_adapter, write_gguf  # noqa: E402

TASKS = 2
TEMPERATURE = 0.6
TURNS = [
    "Thought: let me see.",  # no code: the turn ends by its end token
    "Thought: so.\n<code>\nx = 3 * 4\nprint(x)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(12)\n</code>",
]
Rows = Any  # logits of a completion, one row for each token
Tells = Callable[[Rows, Sequence[int]], list[float]]


def script(call: Call) -> str:
    """The turns one after the other, whatever was sampled before."""
    return TURNS[min(call.turn, len(TURNS) - 1)]


def ran(home: Path, policy: Any, **env: Any) -> Path:
    """The directory of a run whose completions `policy` sampled."""

    async def make() -> None:
        write_tasks(home / "tasks.jsonl", TASKS)
        async with ModelServer("vllm", policy, script) as server:
            ended = await run(*flags(home, server.base_url, max_steps=5, **env), directory=home)
        assert ended.code == 0, ended.stderr

    asyncio.run(make())
    return home / "run"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with place() as directory:
        yield directory


@pytest.fixture(scope="module")
def policy() -> Any:
    return a_model()


@pytest.fixture(scope="module")
def folder(home: Path, policy: Any) -> Path:
    return write(policy, home / "policy")


@pytest.fixture(scope="module")
def made(home: Path, policy: Any) -> Path:
    """A real run, not at temperature 1."""
    return ran(home, policy, temperature=TEMPERATURE, top_p=0.8)


def raw(rows: Rows, ids: Sequence[int]) -> list[float]:
    """What an honest server tells."""
    found: list[float] = rows.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    return found


def told(made: Path, directory: Path, policy: Any, tells: Tells = raw, stale: Any = None) -> Path:
    """The same run, with log-probs as another server would have told them: one that serves `policy` and `tells` in
    its own way. `stale`: the model whose keys and values are in its cache for every prompt."""
    shutil.copytree(made, directory)
    records, groups = lines(made / "rollouts.jsonl"), lines(made / "groups.jsonl")
    logprobs: dict[str, list[float]] = {}
    for record in records:
        line: list[int] = []
        logprobs[record["rollout_id"]] = row = []
        for completion in record["completions"]:
            line += completion["prompt_ids"]
            row += [1.0] * len(completion["prompt_ids"])
            ids = completion["token_ids"]
            with torch.inference_mode():
                cache = (stale or policy)(torch.tensor([line[:-1]]), use_cache=True).past_key_values
                rows = policy(torch.tensor([[line[-1], *ids[:-1]]]), past_key_values=cache).logits[0]
            completion["logprobs"] = [min(0.0, p) for p in tells(rows, ids)]
            line, row[len(row) :] = line + ids, completion["logprobs"]
    for group in groups:
        group["inference_logprobs"] = [logprobs[facts["rollout_id"]] for facts in group["overrides"]]
    for name, rewritten in (("rollouts.jsonl", records), ("groups.jsonl", groups)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in rewritten))
    return directory


def verified(
    capsys: pytest.CaptureFixture[str], directory: Path, *flags: str | Path, good: bool | None = None
) -> str:
    """What was printed. Nothing but the model can tell that something is wrong."""
    capsys.readouterr()
    code = main(["verify", str(directory), *map(str, flags)])
    out = capsys.readouterr().out
    assert "0 violations" in out
    assert good is None or code == (0 if good else 1), out
    return out


def figures(out: str, row: str) -> tuple[int, float]:
    """(tokens, mean absolute difference) in a row of the table."""
    (line,) = [line for line in out.splitlines() if line.startswith(f"{row}  ")]
    count, mean = line.removeprefix(row).split()[:2]
    return int(count.replace(",", "")), float(mean)


# ---------------------------------------------------------------- what fits


def test_a_run_fits_the_model_that_sampled_it_at_any_temperature(
    capsys: pytest.CaptureFixture[str], made: Path, folder: Path
) -> None:
    out = verified(capsys, made, "--model", folder, good=True)
    assert "within the limits: the recorded log-probs are this model's" in out
    assert "limits for weights of this precision (32 bits): mean 0.005, k3 0.0002" in out
    sampled = [len(c["token_ids"]) for line in lines(made / "rollouts.jsonl") for c in line["completions"]]
    assert figures(out, "all trained tokens")[0] == sum(sampled)
    assert figures(out, "first of a turn")[0] == len(sampled)
    assert all(figures(out, name)[0] > 4 for name in (*map(str, Place), "turn 1", "turn 2"))
    assert figures(out, "control: log-probs shifted by one")[1] > 0.5
    assert figures(out, "control: labels shifted by one")[1] > 0.5


def test_so_do_its_weights_in_a_gguf_file(
    capsys: pytest.CaptureFixture[str], made: Path, home: Path, policy: Any
) -> None:
    out = verified(capsys, made, "--model", write_gguf(policy, home / "policy.gguf"), good=True)
    assert figures(out, "stop string")[0] > 0  # its vocabulary is read


def test_quantised_weights_are_unpacked_and_have_limits_of_their_own(
    capsys: pytest.CaptureFixture[str], made: Path, home: Path, policy: Any
) -> None:
    out = verified(capsys, made, "--model", write_gguf(policy, home / "q8.gguf", "Q8_0"))
    assert "stored as Q8_0" in out
    told = re.search(r"rounding makes on these weights: mean ([\d.]+), k3 ([\d.]+)", out)
    assert told is not None
    limits = re.search(r"limits for weights of this precision \(quantised\): mean ([\d.]+), k3 ([\d.]+)", out)
    assert limits is not None
    for limit, rounding, least in zip(limits.groups(), told.groups(), (0.03, 0.002), strict=True):
        assert float(limit) == pytest.approx(max(least, 2 * float(rounding)), rel=0.01)
    # The record is of the weights before they were quantised: near, and far from any shift.
    assert figures(out, "all trained tokens")[1] < figures(out, "control: log-probs shifted by one")[1] / 10


def test_a_server_that_computes_in_half_precision_is_within_limits_that_faults_are_above(
    capsys: pytest.CaptureFixture[str], made: Path, policy: Any, tmp_path: Path
) -> None:
    def halved(model: Any) -> Any:
        there = copy.deepcopy(model).to(torch.bfloat16)
        there.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq  # as servers have them
        return there

    def tells(by: int) -> Tells:
        return lambda rows, ids: shift(raw(rows.float(), ids), by) if by else raw(rows.float(), ids)

    served = halved(policy)
    folder = write(served, tmp_path / "policy")
    out = verified(capsys, told(made, tmp_path / "right", served, tells(0)), "--model", folder, good=True)
    assert "limits for weights of this precision (16 bits): mean 0.1, k3 0.006" in out
    assert figures(out, "all trained tokens")[1] > LIMITS[Precision.FULL].mean, "more exact than a server can be"
    verified(capsys, told(made, tmp_path / "late", served, tells(1)), "--model", folder, good=False)
    later = write(halved(trained_on(policy, 0.05)), tmp_path / "later")
    verified(capsys, tmp_path / "right", "--model", later, good=False)
    stale = write_adapter(policy, tmp_path / "stale", 0)
    verified(capsys, tmp_path / "right", "--model", folder, "--adapter", stale, good=False)


def test_a_sample_of_the_rollouts_is_compared(
    capsys: pytest.CaptureFixture[str], made: Path, folder: Path
) -> None:
    out = verified(capsys, made, "--model", folder, "--max-rollouts", "2", good=True)
    assert "2 of 4 rollouts, chosen evenly over the file with seed 0" in out


def test_the_adapter_that_was_served_fits_and_a_stale_one_or_none_does_not(
    capsys: pytest.CaptureFixture[str], made: Path, policy: Any, folder: Path, tmp_path: Path
) -> None:
    stale, served = (write_adapter(policy, tmp_path / name, seed) for seed, name in enumerate(("stale", "served")))
    together = merged(policy, served)
    there = told(made, tmp_path / "run", together)
    verified(capsys, there, "--model", folder, "--adapter", served, good=True)
    verified(capsys, there, "--model", write(together, tmp_path / "merged"), good=True)
    for wrong in (["--model", folder], ["--model", folder, "--adapter", stale]):
        out = verified(capsys, there, *wrong, good=False)
        assert "above the limits: " in out


# ---------------------------------------------------------------- what does not


def shift(values: Sequence[Any], by: int) -> list[Any]:
    return [*values[-by:], *values[:-by]]


@pytest.mark.parametrize(
    ("tells", "says"),
    [
        (lambda rows, ids: shift(raw(rows, ids), 1), "the log-probs of the token before"),
        (lambda rows, ids: shift(raw(rows, ids), -1), "the log-probs of the token behind"),
        (lambda rows, ids: raw(rows, shift(ids, 1)), "the log-probs that the right rows give the token before"),
        (lambda rows, ids: raw(rows.roll(-1, 0), ids), "the log-probs that the rows of the place behind give"),
        (lambda rows, ids: raw(rows / TEMPERATURE, ids), "log-probs at the sampling temperature"),
    ],
    ids=["log-probs late", "log-probs early", "labels", "rows", "processed"],
)  # fmt: skip
def test_a_server_that_tells_other_log_probs_is_found_and_how_is_named(
    capsys: pytest.CaptureFixture[str],
    made: Path,
    policy: Any,
    folder: Path,
    tmp_path: Path,
    tells: Tells,
    says: str,
) -> None:
    out = verified(capsys, told(made, tmp_path / "run", policy, tells), "--model", folder, good=False)
    assert f"above the limits: recorded are {says}" in out


def test_weights_of_another_version_are_found(
    capsys: pytest.CaptureFixture[str], made: Path, home: Path, policy: Any
) -> None:
    later = write(trained_on(policy, 0.05), home / "later")
    out = verified(capsys, made, "--model", later, good=False)
    assert "above the limits: near, but not these weights: another version of them" in out


def test_keys_and_values_of_older_weights_fit_neither(
    capsys: pytest.CaptureFixture[str], made: Path, policy: Any, folder: Path, tmp_path: Path
) -> None:
    later = trained_on(policy, 0.05)
    there = told(made, tmp_path / "run", later, stale=policy)
    for weights in (folder, write(later, tmp_path / "later")):
        out = verified(capsys, there, "--model", weights, good=False)
        assert "a server that went on with the prefix cache of other weights" in out


def test_another_model_is_found(capsys: pytest.CaptureFixture[str], made: Path, home: Path) -> None:
    out = verified(capsys, made, "--model", write(a_model(seed=3), home / "other"), good=False)
    assert "another model sampled it" in out


def test_a_wrong_tokenizer_is_named(capsys: pytest.CaptureFixture[str], made: Path, tmp_path: Path) -> None:
    small = a_model(entries=1200)
    for model in (
        write(a_model(), tmp_path / "folder", entries=1200),
        write_gguf(small, tmp_path / "small.gguf", entries=1200),
    ):
        out = verified(capsys, made, "--model", model, good=False)
        assert "wrong tokenizer: the model reads the ids of " in out
    out = verified(capsys, made, "--model", write(small, tmp_path / "small", entries=None), good=False)
    assert "wrong model: it has 1,2" in out


def test_a_run_made_of_text_has_nothing_to_compare(
    capsys: pytest.CaptureFixture[str], policy: Any, folder: Path
) -> None:
    with place() as home:
        made = ran(home, policy, token_source="retokenize")
        assert main(["verify", str(made), "--model", str(folder)]) == 1
    assert "nothing to compare: 4 without log-probs (their ids were made from text)" in capsys.readouterr().err


# ---------------------------------------------------------------- models that cannot be used


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), "not a complete safetensors file"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "unheard-of"}'), "cannot be loaded"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "name it by --adapter"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(
    capsys: pytest.CaptureFixture[str], made: Path, folder: Path, tmp_path: Path, spoil: Any, text: str
) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    spoil(broken)
    assert main(["verify", str(made), "--model", str(broken)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("orchestrator: --model: ")
    assert text in said


def test_an_adapter_of_another_model_is_refused(
    capsys: pytest.CaptureFixture[str], made: Path, folder: Path, tmp_path: Path
) -> None:
    other = write_adapter(a_model(hidden=32), tmp_path / "adapter", 0)
    assert main(["verify", str(made), "--model", str(folder), "--adapter", str(other)]) == 2
    assert "does not fit the model" in capsys.readouterr().err


def test_a_long_line_is_computed_whole_and_its_logits_are_made_in_pieces(policy: Any) -> None:
    tokens = torch.randint(3, 1400, (5000,), generator=torch.Generator().manual_seed(1)).tolist()
    places = [*range(1, 200), *range(4500, 5000)]
    with torch.inference_mode():
        whole = policy(torch.tensor([tokens])).logits[0].log_softmax(-1)
    right = [whole[p - 1, tokens[p]].item() for p in places]
    widest = 0

    def watched(module: Any, given: Any, logits: Any) -> None:
        nonlocal widest
        widest = max(widest, logits.shape[-2])

    count = len(places)
    line = TrainedLine("", tokens, places, right, [1] * count, [Place.REST] * count, [None] * count, 1.0)
    hook = policy.lm_head.register_forward_hook(watched)
    compared = Comparison(LIMITS[Precision.FULL])
    compared.add(line, Model(policy).recompute(line))
    hook.remove()
    assert compared.all.mean < 1e-4
    assert widest < 100
