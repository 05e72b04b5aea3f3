"""The forward pass without its libraries: what is compared, what the figures say, what is told and refused."""

from __future__ import annotations

import importlib.util
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.errors import ConfigError, NothingToCompare
from orchestrator.forward import check as checking
from orchestrator.forward.check import Against, Data
from orchestrator.forward.compare import LIMITS, Comparison, Control, Figures, Precision, Recomputed
from orchestrator.forward.lines import LeftOut, Place, TrainedLine, chosen, survey, trained_lines
from orchestrator.forward.model import Model as LoadedModel
from orchestrator.forward.weights import Weights, look_at
from orchestrator.run.line import attempt_line
from orchestrator.run.lines import dumps
from orchestrator.types import Completion, CompletionKind, Message, PolicySpan, Record, Turn
from tests.fakes.plans import TALK, an_attempt

LIMIT = LIMITS[Precision.FULL]
WORDS = {1: "<s>", 2: "a", 3: "b", 4: "</code>", 5: "<end>", 6: "c\n", 7: "</co", 8: "de>\n"}


class Vocabulary:
    """Words by id; 5 ends a turn."""

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(WORDS[i] for i in ids)

    def is_end(self, token_id: int) -> bool:
        return token_id == 5


# ---------------------------------------------------------------- what is compared


def a_turn(number: int, prompt: tuple[int, ...], ids: tuple[int, ...], visible: str, version: str = "1") -> Turn:
    text = Vocabulary().decode(ids)
    logprobs = tuple(-number - at / 10 for at in range(len(ids)))
    completion = Completion(text, visible, "stop", ids, logprobs, len(prompt), len(ids), version)
    talk = (*TALK, *(Message("user", f"go on {n}") for n in range(number - 1)))
    return Turn(number, CompletionKind.ACTION, 0, talk, 0, prompt, "", completion, 0, 1)


TURNS = (
    a_turn(1, (1, 2, 2), (2, 3, 4), "ab"),
    a_turn(2, (1, 2), (3, 7, 8), "b"),
    a_turn(3, (1,), (3, 6, 5), "bc\n", "2"),
)


def a_group(turns: Sequence[Turn] = TURNS, temperature: float = 1.0) -> dict[str, Any]:
    tokens, masks, logprobs = [], [], []
    for turn in turns:
        prompt, sampled = turn.prompt_ids or (), turn.completion.tokens_T or ()
        tokens += [*prompt, *sampled]
        masks += [-100] * len(prompt) + list(sampled)
        logprobs += [1.0] * len(prompt) + list(turn.completion.logprobs_T or ())
    return {
        "tokens": [tokens],
        "masks": [masks],
        "scores": [1.0],
        "inference_logprobs": [logprobs],
        "generation_params": {"temperature": temperature},
        "overrides": [{"rollout_id": "r", "segment": 0, "token_source": "sampled"}],
    }


def a_record(turns: Sequence[Turn] = TURNS) -> dict[str, bytes]:
    return {"r": dumps(attempt_line(replace(an_attempt(), record=Record(0.0, turns=tuple(turns)))))}


def written(folder: Path, *groups: dict[str, Any]) -> Path:
    path = folder / "groups.jsonl"
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return path


def only(path: Path, record: dict[str, bytes] | None, vocabulary: Vocabulary | None) -> TrainedLine:
    (line,) = trained_lines(path, record, range(1), vocabulary)
    return line


def test_each_trained_token_has_its_turn_its_place_and_the_version_that_sampled_it(tmp_path: Path) -> None:
    line = only(written(tmp_path, a_group()), a_record(), Vocabulary())
    assert line.places_P == [3, 4, 5, 8, 9, 10, 12, 13, 14]
    assert line.logprobs_P == [-1.0, -1.1, -1.2, -2.0, -2.1, -2.2, -3.0, -3.1, -3.2]
    assert line.turns_P == (1, 1, 1, 2, 2, 2, 3, 3, 3)
    first, end, stop, rest = Place.FIRST, Place.END, Place.STOP, Place.REST
    assert line.kinds_P == (first, rest, stop, first, stop, stop, first, rest, end)
    assert line.versions_P == ("1",) * 6 + ("2",) * 3
    assert [completion.text for completion in line.completions] == ["ab</code>", "b</code>\n", "bc\n<end>"]


def test_a_completion_whose_weights_changed_has_the_version_of_each_token(tmp_path: Path) -> None:
    spans = (PolicySpan(1, "1", "1"), PolicySpan(1, "1", "2"), PolicySpan(1, "2", "2"))
    turn = replace(TURNS[0], completion=TURNS[0].completion.sampled_from(spans))
    turns = (turn, *TURNS[1:])
    line = only(written(tmp_path, a_group(turns)), a_record(turns), Vocabulary())
    assert line.versions_P == ("1", None, "2", *["1"] * 3, *["2"] * 3)


def test_without_a_record_turns_are_the_stretches_that_are_trained(tmp_path: Path) -> None:
    line = only(written(tmp_path, a_group()), None, Vocabulary())
    assert line.turns_P == (1, 1, 1, 2, 2, 2, 3, 3, 3)
    assert [kind for kind in line.kinds_P if kind is not Place.REST] == [Place.FIRST] * 3 + [Place.END]
    assert (set(line.versions_P), line.completions) == ({None}, ())


@pytest.mark.parametrize("record", [{"r": b"{torn"}, {"other": b"{}"}, a_record(TURNS[:2])])
def test_a_record_that_does_not_make_the_line_is_not_used(tmp_path: Path, record: dict[str, bytes]) -> None:
    line = only(written(tmp_path, a_group()), record, Vocabulary())
    assert line.turns_P == (1, 1, 1, 2, 2, 2, 3, 3, 3)
    assert line.completions == ()


def change(**fields: Any) -> dict[str, Any]:
    return a_group() | fields


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (change(inference_logprobs=None), LeftOut.RETOKENIZED),
        (change(masks=[[-100] * 15]), LeftOut.UNTRAINED),
        (change(masks=None), LeftOut.INVALID),
        (change(masks=[[1]]), LeftOut.INVALID),
        (change(tokens=["text"]), LeftOut.INVALID),
        (change(tokens=[[-1] * 15]), LeftOut.INVALID),
        (change(tokens=[[True] * 15]), LeftOut.INVALID),
        (change(tokens=[]), LeftOut.INVALID),
        (change(inference_logprobs=[[]]), LeftOut.INVALID),
        (change(inference_logprobs=[["0.5"] * 15]), LeftOut.INVALID),
        (change(inference_logprobs=[[math.nan] * 15]), LeftOut.INVALID),  # no JSON either
        ({}, LeftOut.INVALID),
    ],
)
def test_what_cannot_be_compared_is_counted_with_its_reason(
    tmp_path: Path, group: dict[str, Any], why: LeftOut
) -> None:
    found = survey(written(tmp_path, group, a_group()))
    assert (list(found.lengths), list(found.trained), found.highest_id) == ([15], [9], 8)
    assert found.left_out == {why: 1}
    assert found.why_left_out.startswith(f"1 {why}")
    # The others keep their numbers.
    assert [line.where for line in trained_lines(tmp_path / "groups.jsonl", None, {0}, None)] == [
        "groups.jsonl:2, r"
    ]


def test_facts_and_temperatures_that_are_none_are_no_crash(tmp_path: Path) -> None:
    for odd in (None, [None], ["x"], [{"rollout_id": [], "segment": {}}]):
        line = only(written(tmp_path, change(overrides=odd, generation_params=odd)), a_record(), None)
        assert (len(line.places_P), line.temperature) == (9, 1.0)
    for temperature in (0, -1, "1", 1e9):
        assert only(written(tmp_path, a_group(temperature=temperature)), None, None).temperature == 1.0  # type: ignore[arg-type]


def test_rollouts_are_chosen_evenly_and_always_the_same() -> None:
    assert set(chosen(5, None)) == set(chosen(5, 5)) == set(chosen(5, 9)) == set(range(5))  # type: ignore[call-overload]
    some = chosen(1000, 10)
    assert sorted(number // 100 for number in some) == list(range(10))  # type: ignore[attr-defined]
    assert some == chosen(1000, 10)


# ---------------------------------------------------------------- what the figures say


def told(values: Sequence[float]) -> Figures:
    figures = Figures()
    for value in values:
        figures.add(value, 0.0)
    return figures


def test_figures_are_those_of_their_definitions() -> None:
    figures = told([0.5, -0.25, 0.0, 0.25])
    assert figures.mean == 0.25
    k3 = sum(math.exp(d) - 1 - d for d in (0.5, -0.25, 0.0, 0.25)) / 4
    assert figures.k3 == pytest.approx(k3)
    assert told([1.0] * 99 + [7.0]).p99 == 1.0
    assert told([1.0] * 98 + [7.0] * 2).p99 == 7.0
    assert math.isnan(told([]).mean)
    assert not told([]).within(LIMIT)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, -1e300])
def test_numbers_that_are_none_are_above_every_limit(value: float) -> None:
    assert not told([0.0] * 1000 + [value]).within(LIMITS[Precision.QUANTISED])


TOKENS = 400


@dataclass
class Model:
    """Log-probs that are drawn, and what a record of them would be."""

    line: TrainedLine
    again: Recomputed


def a_model(seed: int = 0, temperature: float = 1.0) -> Model:
    draw = Random(seed)
    own, before, behind = ([-draw.expovariate(0.7) for _ in range(TOKENS)] for _ in range(3))
    line = TrainedLine(
        where="groups.jsonl:1, r",
        tokens=[2] * (TOKENS + 1),
        places_P=range(1, TOKENS + 1),
        logprobs_P=[p + draw.gauss(0, 0.001) for p in own],
        turns_P=[1 + at // 100 for at in range(TOKENS)],
        kinds_P=[Place.REST if at % 100 else Place.FIRST for at in range(TOKENS)],
        versions_P=["7"] * TOKENS,
        temperature=temperature,
    )
    return Model(line, Recomputed(own, before, behind, [p / 2 for p in own]))


def compared(model: Model, precision: Precision = Precision.FULL, **fields: Any) -> Comparison:
    comparison = Comparison(LIMITS[precision])
    comparison.add(replace(model.line, **fields), model.again)
    return comparison


def test_a_right_record_is_within_the_limits_and_no_control_is() -> None:
    comparison = compared(a_model())
    assert comparison.above() == []
    assert comparison.says() == "the recorded log-probs are this model's"
    assert [name for name, _ in comparison.rows()] == [
        "all trained tokens", "first of a turn", "rest", "turn 1", "turn 2", "turn 3", "turn 4",
    ]  # fmt: skip
    assert not any(figures.within(LIMITS[Precision.QUANTISED]) for figures in comparison.controls.values())


def shifted(values: Sequence[float], by: int) -> list[float]:
    return [values[min(max(at - by, 0), len(values) - 1)] for at in range(len(values))]


@pytest.mark.parametrize(
    ("control", "record"),
    [
        (Control.TOKEN_BEFORE, lambda again: shifted(again.own_P, 1)),
        (Control.TOKEN_BEHIND, lambda again: shifted(again.own_P, -1)),
        (Control.LABEL_BEFORE, lambda again: again.before_P),
        (Control.LABEL_BEHIND, lambda again: again.behind_P),
        (Control.ROW_BEFORE, lambda again: shifted(again.behind_P, 1)),
        (Control.ROW_BEHIND, lambda again: shifted(again.before_P, -1)),
        (Control.TEMPERED, lambda again: again.tempered_P),
    ],
)
def test_a_record_that_is_wrong_in_one_way_is_named(
    control: Control, record: Callable[[Recomputed], list[float]]
) -> None:
    model = a_model(temperature=0.5)
    comparison = compared(model, logprobs_P=record(model.again))
    assert "all trained tokens" in comparison.above()
    assert comparison.says() == f"recorded are {control}"


def test_a_shift_is_found_where_the_policy_is_sure_and_the_limits_are_wide() -> None:
    model = a_model()
    sure = replace(model.again, own_P=[p / 40 for p in model.again.own_P])
    draw = Random(1)
    for by, right in ((1, False), (-1, False), (0, True)):
        recorded = [p + draw.gauss(0, 0.004) for p in shifted(sure.own_P, by)]
        comparison = compared(replace(model, again=sure), Precision.HALF, logprobs_P=recorded)
        assert comparison.above() == []
        assert comparison.is_right == right
        assert comparison.says().startswith(
            "the recorded log-probs are" if right else "recorded are the log-probs of"
        )


def test_a_control_at_the_border_of_two_turns_is_none() -> None:
    model = a_model()
    apart = compared(model, places_P=range(1, 2 * TOKENS, 2), tokens=[2] * 2 * TOKENS)
    assert apart.controls == {}
    assert apart.nearest((Control.TOKEN_BEFORE, Control.TOKEN_BEHIND)) is None


def test_weights_near_these_and_another_model_s_are_told_apart() -> None:
    model, draw = a_model(), Random(1)
    near = compared(model, logprobs_P=[p + draw.gauss(0, 0.2) for p in model.again.own_P])
    assert near.says().startswith("near, but not these weights")
    far = compared(model, logprobs_P=a_model(5).again.own_P)
    assert "another model sampled it" in far.says()


def test_a_fault_in_one_place_is_not_lost_in_the_mean() -> None:
    model = a_model()
    spoiled = [p - 0.04 if at < 100 else p for at, p in enumerate(model.again.own_P)]
    comparison = compared(model, Precision.QUANTISED, logprobs_P=spoiled)
    assert comparison.above() == ["turn 1"]
    assert comparison.says() == "together the tokens are within the limits, but not at: turn 1"


def test_a_row_of_a_few_tokens_is_shown_and_not_judged() -> None:
    model = a_model()
    spoiled = [p - 0.1 if at % 100 == 0 else p for at, p in enumerate(model.again.own_P)]
    comparison = compared(model, logprobs_P=spoiled)
    assert comparison.places[Place.FIRST].mean > LIMIT.mean
    assert comparison.above() == []


def test_of_several_versions_the_one_that_fits_is_named() -> None:
    model, draw = a_model(), Random(1)
    mixed = [p + (draw.gauss(0, 0.5) if at < 200 else 0) for at, p in enumerate(model.again.own_P)]
    versions = ["6" if at < 200 else "7" for at in range(TOKENS)]
    comparison = compared(model, logprobs_P=mixed, versions_P=versions)
    assert "policy version 6" in comparison.above()
    assert "policy version 7" not in comparison.above()
    assert comparison.says() == "the model is policy version 7; other versions sampled the rest"


def test_tokens_that_cannot_show_a_shift_are_said_to() -> None:
    sure = [-1e-6] * TOKENS
    model = Model(a_model().line, Recomputed(sure, a_model().again.before_P, a_model().again.behind_P, sure))
    comparison = compared(model, logprobs_P=sure)
    assert comparison.above() == []
    assert f"{Control.TOKEN_BEFORE} would pass as well" in comparison.says()


# ---------------------------------------------------------------- what is told and refused


class FakeModel(LoadedModel):
    """Gives every place the log-prob that `says` makes of the recorded one."""

    architecture = "FakeForCausalLM"
    vocabulary_size = 9
    context: int | None = 100

    def __init__(self, says: Callable[[float], float] = lambda recorded: recorded) -> None:
        self._says = says

    def speed(self) -> float:
        return 5.0

    def recompute(self, line: TrainedLine) -> Recomputed:
        far = [-9.0] * len(line.places_P)
        return Recomputed(list(map(self._says, line.logprobs_P)), far, far, far)

    def rounded(self, line: TrainedLine) -> list[float]:
        return [self._says(recorded) - 0.05 for recorded in line.logprobs_P]


def against(vocabulary: Vocabulary | None = None, most: int | None = None, parameters: int = 10) -> Against:
    return Against(Weights(Path("m"), parameters, "F32", Precision.FULL, vocabulary), None, most)


def checked(path: Path, model: FakeModel | None = None, asked: Against | None = None, record: Any = None) -> bool:
    data = Data(path, record, lambda: None)
    return checking.check(data, asked or against(), lambda weights, adapter: model or FakeModel())


def test_a_record_that_fits_is_said_to_with_the_limits_and_the_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(written(tmp_path, a_group(), a_group()))
    captured = capsys.readouterr()
    assert "2 of 2 rollouts: 30 tokens go through the model, 18 of them are trained, the longest line has 15" in (
        captured.err
    )
    assert "about 6 s at 5 tokens/s" in captured.err
    assert "limits for weights of this precision (32 bits): mean 0.005, k3 0.0002" in captured.out
    assert "within the limits: the recorded log-probs are this model's" in captured.out
    assert "ids were not compared with texts" in captured.out
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["all", "trained", "tokens", "18", "0.0000", "0.000", "0.000000"] in rows


@pytest.mark.parametrize(("off", "fits"), [(0.09, True), (0.11, False)])
def test_quantised_weights_have_the_limits_that_their_own_rounding_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], off: float, fits: bool
) -> None:
    stored = Against(Weights(Path("m"), 10, "Q4_1", Precision.QUANTISED, None), None, None)
    model = FakeModel(lambda recorded: recorded - off)  # the rounding makes 0.05 more
    assert checked(written(tmp_path, a_group()), model, stored) is fits
    out = capsys.readouterr().out
    assert "what a server's rounding makes on these weights: mean 0.0500, k3 0.0012" in out
    assert "limits for weights of this precision (quantised): mean 0.1, k3 0.002" in out


def test_a_record_that_does_not_fit_is_above_the_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not checked(written(tmp_path, a_group()), FakeModel(lambda recorded: recorded - 0.2))
    assert "above the limits: " in capsys.readouterr().out


def test_a_sample_is_of_so_many_rollouts_and_says_how_it_was_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(written(tmp_path, *[a_group()] * 10), asked=against(most=3))
    captured = capsys.readouterr()
    assert "3 of 10 rollouts: 45 tokens" in captured.err
    assert "3 of 10 rollouts, chosen evenly over the file with seed 0" in captured.out
    assert " 27 " in captured.out


def test_data_without_log_probs_have_nothing_to_compare(tmp_path: Path) -> None:
    text = change(inference_logprobs=None)
    with pytest.raises(NothingToCompare, match=r"nothing to compare: 2 without log-probs \(their ids were made"):
        checked(written(tmp_path, text, text))
    with pytest.raises(NothingToCompare, match="no rollout"):
        checked(written(tmp_path))


def test_a_wrong_tokenizer_is_named_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = written(tmp_path, a_group()), a_record()
    assert checked(path, asked=against(Vocabulary()), record=record)
    monkeypatch.setitem(WORDS, 6, "d\n")
    assert not checked(path, asked=against(Vocabulary()), record=record)
    out = capsys.readouterr().out
    assert "wrong tokenizer: the model reads the ids of 1 of 3 completions as other texts" in out
    assert r"groups.jsonl:1, r: 'd\n<end>' and not 'c\n<end>'" in out


def test_ids_beyond_the_model_s_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = FakeModel()
    small.vocabulary_size = 8
    assert not checked(written(tmp_path, a_group()), small)
    assert "wrong model: it has 8 ids, and id 8 is in the data" in capsys.readouterr().out


def test_lines_longer_than_the_model_s_context_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = FakeModel()
    short.context = 14
    path = written(tmp_path, a_group(), a_group(TURNS[:1]))
    assert checked(path, short)
    assert "rollouts left out: 1 longer than the model's 14 tokens" in capsys.readouterr().out
    short.context = 3
    with pytest.raises(NothingToCompare, match="all lines are longer"):
        checked(path, short)


def test_too_little_memory_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(checking.EnvironmentUnusable, match=r"the weights need 4000000\.0 GB of memory"):
        checked(written(tmp_path, a_group()), asked=against(parameters=10**15))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--adapter", "a"], "go with --model"),
        (["--max-rollouts", "3"], "go with --model"),
        (["--model", "m", "--max-rollouts", "0"], "--max-rollouts: must be a whole number of at least 1"),
    ],
)
def test_options_without_a_model_are_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "run", *flags]) == 2
    assert text in capsys.readouterr().err


def test_without_the_extra_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["verify", "run", "--model", "m"]) == 3
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "pip install 'rollout-orchestrator[torch]'" in told


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A file of such a header; its numbers are zeros."""
    head, at = {}, 0
    for name, (kind, shape, size) in tensors.items():
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


@pytest.mark.parametrize(
    ("tensors", "config", "precision", "stored"),
    [
        ({"w": ("F32", [4, 5], 80)}, {}, Precision.FULL, "F32"),
        ({"w": ("BF16", [4, 5], 40), "n": ("F32", [1], 4)}, {}, Precision.HALF, "BF16, F32"),
        ({"w": ("F8_E4M3", [4, 5], 20), "n": ("F32", [1], 4)}, {}, Precision.QUANTISED, "F8_E4M3, F32"),
        (
            {"w": ("F32", [20], 80)},
            {"quantization_config": {"quant_method": "awq"}},
            Precision.QUANTISED,
            "awq: F32",
        ),
    ],
)
def test_how_weights_are_stored_is_read_from_their_files(
    tmp_path: Path,
    tensors: dict[str, tuple[str, list[int], int]],
    config: dict[str, Any],
    precision: Precision,
    stored: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors(tmp_path / "model.safetensors", tensors)
    weights = look_at(tmp_path)
    assert (weights.precision, weights.stored, weights.vocabulary) == (precision, stored, None)
    assert weights.parameters == sum(math.prod(shape) for _, shape, _ in tensors.values())


def test_weights_in_several_files_are_those_that_the_index_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number in (1, 2, 3):
        safetensors(tmp_path / f"model-{number}.safetensors", {"w": ("F32", [number], 4 * number)})
    named = {"a": "model-1.safetensors", "b": "../model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert look_at(tmp_path).parameters == 3


def test_files_that_are_no_model_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not on this machine"):
        look_at(tmp_path / "Qwen")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        look_at(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no model\.safetensors"):
        look_at(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not a complete safetensors file"):
        look_at(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        look_at(tmp_path / "m.gguf")
