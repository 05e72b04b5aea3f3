"""`verify --model` from the files to the verdict: what it costs, the tokenizer, the forward pass, the table.

What it costs and how far it is goes to standard error, what it found to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable, NothingToCompare
from orchestrator.forward.compare import LIMITS, ROUNDED_TOKENS, Comparison, Figures, Precision, widened
from orchestrator.forward.lines import SEED, Survey, TrainedLine, Vocabulary, chosen, survey, trained_lines
from orchestrator.forward.model import Model, demand_adapter, demand_libraries
from orchestrator.forward.table import print_comparison
from orchestrator.forward.weights import Weights, look_at
from orchestrator.rules.text import one_line
from orchestrator.terminal.bar import bar, span
from orchestrator.terminal.closing import print_wrapped

_GB = 1e9
_F32_BYTES = 4
_DIFFERENCE_CHARS = 30


@dataclass(frozen=True, slots=True)
class Data:
    """The training data. `rollouts`: lines of rollouts.jsonl by rollout id; None: there is no record."""

    groups_file: Path
    rollouts: Mapping[str, bytes] | None
    tokenizer: Callable[[], Vocabulary | None]  # the run's own, called where the model has none


@dataclass(frozen=True, slots=True)
class Against:
    """What the data are compared with. `adapter`: a LoRA folder. `max_rollouts` None: all."""

    weights: Weights
    adapter: Path | None
    max_rollouts: int | None

    @classmethod
    def of(cls, model: Path, adapter: Path | None, max_rollouts: int | None) -> Against:
        """Quick. Raises EnvironmentUnusable without the extra, ConfigError for files that cannot be used."""
        demand_libraries()
        if adapter is not None:
            demand_adapter(adapter)
        return cls(look_at(model), adapter, max_rollouts)


Load = Callable[[Weights, Path | None], Model]


def check(data: Data, against: Against, load: Load = Model.load) -> bool:
    """Whether the recorded log-probs are the model's; printed with all figures. Blocking, for minutes to hours.

    Raises NothingToCompare, EnvironmentUnusable for too little memory, ConfigError for a model that cannot be
    loaded.
    """
    contents = survey(data.groups_file)
    if not contents.lengths:
        raise NothingToCompare(f"{data.groups_file}: nothing to compare: {contents.why_left_out or 'no rollout'}")
    numbers = chosen(len(contents.lengths), against.max_rollouts)
    tokens = _announce(contents, numbers, against)
    vocabulary = against.weights.vocabulary or data.tokenizer()

    def selected() -> Iterator[TrainedLine]:
        return trained_lines(data.groups_file, data.rollouts, numbers, vocabulary)

    if against.weights.vocabulary is not None and (misread := _misread(selected(), against.weights.vocabulary)):
        return _wrong(misread)
    model = load(against.weights, against.adapter)
    if contents.highest_id >= model.vocabulary_size:
        return _wrong(
            f"wrong model: it has {model.vocabulary_size:,} ids, and id {contents.highest_id:,} is in the data"
        )
    speed = model.speed()
    _say(f"about {span(tokens / speed)} at {speed:.0f} tokens/s")
    compared, rounding, too_long = Comparison(LIMITS[against.weights.precision]), Figures(), 0
    quantised = against.weights.precision is Precision.QUANTISED
    with bar(tokens, "tokens", sys.stderr) as advance:
        for line in selected():
            if model.context is not None and len(line.tokens) > model.context:
                too_long += 1
            else:
                again = model.recompute(line)
                compared.add(line, again)
                if quantised and rounding.count < ROUNDED_TOKENS:
                    for exact, rounded in zip(again.own_P, model.rounded(line), strict=True):
                        rounding.add(rounded, exact)
            advance(len(line.tokens))
    if not compared.lines:
        raise NothingToCompare(
            f"nothing to compare: all lines are longer than the model's {model.context:,} tokens"
        )
    compared.limits = widened(compared.limits, rounding)
    notes = _notes(contents, against, too_long, model)
    if rounding.count:
        notes.append(
            f"what a server's rounding makes on these weights: mean {rounding.mean:.4f}, k3 {rounding.k3:.6f} "
            f"(of {rounding.count} tokens)"
        )
    return print_comparison(compared, against.weights, model.architecture, notes)


def _announce(contents: Survey, numbers: Container[int], against: Against) -> int:
    """Says what it will cost. Returns how many tokens go through the model. Raises EnvironmentUnusable."""
    selected = [at for at in range(len(contents.lengths)) if at in numbers]
    tokens = sum(contents.lengths[at] for at in selected)
    trained = sum(contents.trained[at] for at in selected)
    need = against.weights.parameters * _F32_BYTES
    longest = max(contents.lengths[at] for at in selected)
    _say(
        f"{len(selected):,} of {len(contents.lengths):,} rollouts: {tokens:,} tokens go through the model, "
        f"{trained:,} of them are trained, the longest line has {longest:,}; the weights take "
        f"{need / _GB:.1f} GB in f32; loading takes a minute or more"
    )
    free = _free_bytes()
    if free is not None and free < need:
        raise EnvironmentUnusable(
            f"--model: the weights need {need / _GB:.1f} GB of memory in f32, and {free / _GB:.1f} GB are free; "
            "use a machine with more"
        )
    return tokens


def _free_bytes() -> int | None:
    """Memory that is free or can be freed; None where the kernel does not say."""
    try:
        meminfo = Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return None
    fields = [line.split() for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    return int(fields[0][1]) * 1024 if fields else None


def _misread(chosen_lines: Iterator[TrainedLine], vocabulary: Vocabulary) -> str:
    """Compares the sampled ids, as the model's vocabulary reads them, with the sampled text. Empty: the same."""
    looked = wrong = 0
    first = ""
    for line in chosen_lines:
        for completion in line.completions:
            looked += 1
            read = vocabulary.decode(completion.tokens_T or ())
            if read.strip() != completion.text.strip():  # some vocabularies drop a space at the beginning
                wrong += 1
                first = first or f"{line.where}: {_difference(read, completion.text)}"
    if not wrong:
        return ""
    return (
        f"wrong tokenizer: the model reads the ids of {wrong:,} of {looked:,} completions as other texts; {first}"
    )


def _difference(read: str, sampled: str) -> str:
    """Both texts from where they part."""
    same = next((at for at, (a, b) in enumerate(zip(read, sampled, strict=False)) if a != b), None)
    at = min(len(read), len(sampled)) if same is None else same
    end = at + _DIFFERENCE_CHARS
    return f"{read[at:end]!r} and not {sampled[at:end]!r}"


def _notes(contents: Survey, against: Against, too_long: int, model: Model) -> list[str]:
    """What was left out or could not be looked at."""
    notes = []
    if against.max_rollouts is not None and against.max_rollouts < len(contents.lengths):
        part = f"{against.max_rollouts:,} of {len(contents.lengths):,} rollouts"
        notes.append(f"{part}, chosen evenly over the file with seed {SEED}")
    if contents.left_out:
        notes.append(f"rollouts left out: {contents.why_left_out}")
    if too_long:
        notes.append(f"rollouts left out: {too_long:,} longer than the model's {model.context:,} tokens")
    if against.weights.vocabulary is None:
        notes.append("the model has no tokenizer that can be read: ids were not compared with texts")
    if against.adapter is not None:
        notes.append(f"with the adapter {against.adapter}")
    return notes


def _wrong(why: str) -> bool:
    print_wrapped(f"above all limits: {one_line(why)}", sys.stdout)
    return False


def _say(text: str) -> None:
    print_wrapped(f"verify: {text}", sys.stderr)
