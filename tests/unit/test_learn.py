"""Tasks, batches, processes and page of the example that learns. Its trainer and whole runs:
integration/trainers/test_learn.py."""

from __future__ import annotations

import fcntl
import http.client
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from examples.learn.__main__ import main
from examples.learn.batches import Unfit, check, evenly, next_batch
from examples.learn.measured import Measured, by_chance, learned
from examples.learn.page import write_page
from examples.learn.processes import (
    HOPELESS,
    MOST_STALLS,
    MOST_STARTS,
    Broken,
    Patience,
    Process,
    alone,
    end_with_parent,
)
from examples.learn.rounds import PROMPTS, Plan, Run
from examples.learn.tasks import SHARE, same_words, write_tasks
from examples.trainer import MASKED, MASKED_LOGPROB, Group
from orchestrator.tasks.selection import held_out

# Not imported here: that takes seconds, in each test process.
pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra reasoning-gym")

SETS = ("gcd", "products")


@cache
def made(seed: int, sets: tuple[str, ...] = SETS) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Held-out tasks, and those to train on."""
    with TemporaryDirectory() as folder:
        write_tasks(path := Path(folder) / "tasks.jsonl", sets, 5, 30, seed)
        told = [json.loads(line) for line in path.read_text().splitlines()]
    return told[: 5 * len(sets)], told[5 * len(sets) :]


@pytest.mark.long
def test_tasks_lie_on_both_sides_of_the_split_and_share_no_words() -> None:
    measured, trained = made(1)
    assert (len(measured), len(trained)) == (10, 60)
    assert all(held_out(task["task_id"], SHARE) for task in measured)
    assert not any(held_out(task["task_id"], SHARE) for task in trained)
    assert {task["metadata"]["seed"] for task in measured}.isdisjoint(t["metadata"]["seed"] for t in trained)
    assert same_words([t["question"] for t in trained], [m["question"] for m in measured]) == 0
    assert [task["level"] for task in trained[:4]] == ["gcd", "products"] * 2, "sets take turns"
    assert len({task["question"] for task in trained}) == 60


def test_another_seed_trains_on_other_tasks_and_is_measured_by_the_same() -> None:
    (measured, trained), (measured_too, others) = made(1), made(2)
    assert measured == measured_too
    assert same_words([task["question"] for task in trained], [task["question"] for task in others]) == 0


def test_a_task_in_a_held_out_ones_words_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were sixty questions in all, and forty were held out."""
    monkeypatch.setattr("examples.learn.tasks._words", lambda task: str(int(task.answer) % 60))
    path = tmp_path / "t.jsonl"
    left_out = write_tasks(path, ("chain_sum",), 40, 5, 1)
    told = [int(json.loads(line)["answer"]) % 60 for line in path.read_text().splitlines()]
    assert left_out > 0
    assert not set(told[:40]) & set(told[40:])
    assert same_words(["What  IS\nthis?"], ["what is this?"]) == 1


def test_a_set_with_too_few_tasks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.learn.tasks._words", lambda task: "all the same")
    with pytest.raises(SystemExit, match="gcd has no 2 different tasks"):
        write_tasks(tmp_path / "t.jsonl", ("gcd",), 2, 1, 1)


# ---------------------------------------------------------------- batches


def a_group(version: str | None = "/runs/policy/policy-3", **other: Any) -> Group:
    """Two rollouts of three tokens."""
    return {
        "tokens": [[1, 2, 3], [1, 2, 4]],
        "masks": [[MASKED, 2, 3], [MASKED, 2, 4]],
        "inference_logprobs": [[MASKED_LOGPROB, -0.1, -0.2], [MASKED_LOGPROB, -0.1, -0.3]],
        "scores": [1.0, 0.0],
        "overrides": [{"policy_version": version}, {"policy_version": version}],
        **other,
    }


class ScriptedRunApi:
    """Answers as told. As a run-api that is started again, it knows no trainer after a failure."""

    def __init__(self, *answers: list[Group] | Exception | None) -> None:
        self.answers, self.registrations, self.known = list(answers), 0, False

    def registered(self) -> bool:
        return self.known

    def register(self, **_: Any) -> None:
        self.registrations += 1
        self.known = True

    def batch(self) -> list[Group] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            self.known = False
            raise answer
        return answer


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.learn.batches.POLL_S", 0)


def test_a_batch_is_waited_for_while_the_run_api_hangs_dies_or_forgets(tmp_path: Path, no_waiting: None) -> None:
    broken = [
        TimeoutError(),
        http.client.IncompleteRead(b"{"),
        ConnectionRefusedError(),
        json.JSONDecodeError("", "", 0),
    ]
    api: Any = ScriptedRunApi(None, *broken, None, [a_group()])
    assert next_batch(api, 2, 99, 3, tmp_path / "batch-3.json", logprobs=True) == [a_group()]
    assert api.registrations == 1 + len(broken)


def test_a_wrong_batch_is_left_out_and_does_not_block_the_run(
    tmp_path: Path, no_waiting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "batch-3.json"
    wrong = [
        a_group(masks=[[MASKED, 9, 3], [MASKED, 2, 4]]),
        a_group("/runs/policy/policy-2"),
        a_group(overrides=[{}]),
    ]
    api: Any = ScriptedRunApi(*([group] for group in wrong), [a_group(), a_group()], [a_group(None)])
    assert next_batch(api, 2, 99, 3, kept, logprobs=True) == [a_group(None)]
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("trainer: a batch is left out: ") for line in said] == [True] * 4
    assert "a mask that is neither -100 nor its token" in said[0]
    assert "sampled by policy-2 and not by policy-3" in said[1]
    assert "4 rollouts and not 2" in said[3]
    assert next_batch(api, 2, 99, 3, kept, logprobs=True) == [a_group(None)], "as it is on disk"


def test_grpo_does_not_train_without_log_probs(tmp_path: Path, no_waiting: None) -> None:
    kept, bare = tmp_path / "batch-3.json", a_group(inference_logprobs=None)
    api: Any = ScriptedRunApi([bare], [bare])
    with pytest.raises(Unfit, match="GRPO needs inference_logprobs"):
        next_batch(api, 2, 99, 3, kept, logprobs=True)
    assert not kept.exists()
    assert next_batch(api, 2, 99, 3, kept, logprobs=False) == [bare]


def test_minibatches_are_of_nearly_one_size() -> None:
    sizes = [[len(part) for part in evenly(range(count), 4)] for count in (0, 3, 4, 9, 10, 12)]
    assert sizes == [[], [3], [4], [3, 3, 3], [3, 3, 4], [4, 4, 4]]
    assert [n for part in evenly(range(9), 4) for n in part] == list(range(9))
    check([a_group()], 2, 3)


# ---------------------------------------------------------------- processes


def ended(folder: Path, *words: str) -> Process:
    """A process that has run to its end."""
    process = Process(folder / "one.log", "examples.learn.__init__")
    process._command = [sys.executable, "-c", *words]
    process.start()
    assert process._process is not None
    process._process.wait()
    return process


def test_a_process_that_tells_of_its_signal_was_ended_by_it(tmp_path: Path) -> None:
    codes = [ended(tmp_path, f"raise SystemExit({code})").code() for code in (0, 1, 3, 128 + 15)]
    assert codes == [0, 1, 3, -15]
    assert ended(tmp_path, "import signal; signal.raise_signal(9)").code() == -9


def test_what_is_hopeless_is_not_started_again(tmp_path: Path) -> None:
    process = ended(tmp_path, f"print('no use'); raise SystemExit({HOPELESS})")
    with pytest.raises(Broken, match="one gave up: no use"):
        process.keep()


def test_a_child_whose_parent_ended_before_it_could_ask_does_not_live() -> None:
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    asks = end_with_parent()
    assert subprocess.run(command, preexec_fn=asks).returncode == 7
    gone = partial(asks.func, 0)  # no process is the child of this one
    assert subprocess.run(command, preexec_fn=gone).returncode == 1


def test_a_wait_in_which_nothing_changes_on_disk_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grows, process = tmp_path / "rollouts.jsonl", Process(tmp_path / "serve.log", "x")
    patience = Patience(grows, tmp_path / "not there yet")
    assert not patience.is_over(process)
    monkeypatch.setattr("examples.learn.processes.STILL_S", 1e-9)
    for number in range(MOST_STALLS - 1):
        grows.write_text("x" * number)
        assert patience.is_over(process)
    with pytest.raises(Broken, match="serve did nothing for 0 minutes, 3 times"):
        patience.is_over(process)
    monkeypatch.setattr("examples.learn.processes.STILL_S", 60.0)
    assert not Patience(grows).is_over(process)


def test_one_trainer_holds_a_folder(tmp_path: Path) -> None:
    with alone(tmp_path), pytest.raises(Broken, match="another process learns in"), alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


# ---------------------------------------------------------------- the page


def an_evaluation(folder: Path, right: dict[str, str]) -> Measured:
    """Of sets whose tasks were right (+), wrong (-) or broke (x)."""
    folder.mkdir(parents=True)
    with (folder / "samples.jsonl").open("w") as file:
        for level, answers in right.items():
            for number, answer in enumerate(answers):
                correct = {"+": True, "-": False, "x": None}[answer]
                file.write(json.dumps({"task_id": f"{level}-{number}", "level": level, "correct": correct}) + "\n")
    return Measured(folder)


def test_what_counts_as_learned(tmp_path: Path) -> None:
    before = an_evaluation(tmp_path / "0", {"a": "-" * 12, "b": "+" + "-" * 11, "c": "+-" * 6, "d": "+" * 12})
    after = an_evaluation(
        tmp_path / "1", {"a": "+" * 7 + "-" * 5, "b": "-" + "+" * 6 + "-" * 5, "c": "-+" * 6, "d": "+" * 12}
    )
    assert by_chance(before, after, "a") == 1 / 2**7
    assert by_chance(before, after, "b") == (1 + 7) / 2**7, "six of the seven that changed rose"
    assert by_chance(before, after, "c") > 0.5
    assert by_chance(before, after, "d") == 1, "nothing changed"
    assert learned(before, after, ["b"]) == []
    assert learned(before, after, ["a", "b", "c", "d"]) == ["a"], "1 of 128 is below 0.05 / 4"
    assert learned(before, after, ["a", *"bcd", *"bcd"]) == [], "and not below 0.05 / 7"


def test_a_sample_that_broke_counts_as_wrong(tmp_path: Path) -> None:
    measured = an_evaluation(tmp_path / "0", {"a": "++-x", "b": "xxxx"})
    assert measured.missing == 5
    assert measured.share("a").value == 0.5
    assert str(measured.share("b")) == "0.0% (0.0% to 49.0%)"
    assert measured.share().value == 0.25


def a_run(folder: Path, *, control: bool = False, sets: tuple[str, ...] = SETS) -> None:
    """As a run of one round leaves it, with a model that writes markup, before its second batch is trained on."""
    measured, trained = made(1, sets)
    folder.mkdir()
    plan = {"model": "m<script>", "algorithm": "grpo", "control": control, "sets": sets, "rounds": 4}
    (folder / "learn.json").write_text(json.dumps(plan))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in measured + trained))
    for version in (0, 1):
        (folder / f"eval-{version}").mkdir()
        (folder / f"eval-{version}" / "metrics.json").write_text("{}")
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<b>bold</b>"}]
        samples = [
            {"task_id": task["task_id"], "level": task["level"], "correct": bool(version) or number < 2}
            | {"answer": None, "messages": said}
            for number, task in enumerate(measured)
        ]
        (folder / f"eval-{version}" / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    (folder / "policy").mkdir()
    facts = {
        "task_id": trained[0]["task_id"],
        "outcome": "finished",
        "policy_version": "/x/policy-0",
        "staleness": 0,
    }
    (folder / "policy" / "batch-0.json").write_text(json.dumps([{"overrides": [facts, facts]}] * 2))
    leak = [{"overrides": [facts | {"task_id": measured[0]["task_id"]}]}]
    (folder / "policy" / "batch-1.json").write_text(json.dumps(leak))
    check = {"mean": 0.01, "k3": 0.0002, "tokens": 7}
    step = {"reward": 0.5, "groups": 1, "groups_learned_from": 1, "losses": [0.2, 0.1], "clipped": 0.0,
            "check": check, "seconds": 3.0}  # fmt: skip
    (folder / "policy" / "step-1.json").write_text(json.dumps(step))


def test_the_page_tells_what_was_learned_and_runs_nothing_a_model_wrote(tmp_path: Path) -> None:
    a_run(tmp_path / "seed-1")
    a_run(tmp_path / "control-1", control=True)
    page = write_page(tmp_path).read_text()
    assert "20.0% (5.7% to 51.0%)" in page
    assert "100.0% (72.2% to 100.0%)" in page
    assert page.count("none is held out or has a held-out task's words") == 2
    assert page.count("1 different tasks were trained on, 1 of them more than once") == 2
    assert page.count("<td>0.0039<td>none<td>gcd, products") == 2, (
        "five of five is chance, when there are two sets"
    )
    assert "Examples, chosen" in page
    assert "scores shuffled: it must not learn" in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<script" not in page
    assert "<b>bold" not in page


def test_a_held_out_task_that_was_trained_on_is_shouted_about(tmp_path: Path) -> None:
    a_run(tmp_path / "seed-1")
    batch = tmp_path / "seed-1" / "policy" / "batch-0.json"
    told = json.loads(batch.read_text())
    measured, _ = made(1)
    told[0]["overrides"][0]["task_id"] = measured[0]["task_id"]
    batch.write_text(json.dumps(told))
    assert "1 ARE HELD OUT" in write_page(tmp_path).read_text(), "by its id and its words, and counted once"


def test_runs_of_different_sets_are_on_one_page(tmp_path: Path) -> None:
    a_run(tmp_path / "one")
    a_run(tmp_path / "two", sets=("chain_sum", "gcd"))
    page = write_page(tmp_path).read_text()
    for name, runs in (("products", ["one"]), ("gcd", ["one", "two"]), ("chain_sum", ["two"])):
        chart = page.split(f'class="title">{name}<')[1].split("</svg>")[0]
        assert [run for run in ("one", "two") if f"{run}, round 1" in chart] == runs
    assert 'stroke="#059669"' in page.split('class="title">chain_sum<')[1].split("</svg>")[0], "as in the legend"
    assert not list(tmp_path.glob("*.part"))


def test_a_run_that_was_measured_at_its_ends_has_two_points(tmp_path: Path) -> None:
    a_run(tmp_path / "seed-1")
    (tmp_path / "seed-1" / "eval-1").rename(tmp_path / "seed-1" / "eval-3")
    page = write_page(tmp_path).read_text()
    assert "after round 3: right" in page
    assert "seed-1, round 3: 100.0%" in page
    assert "<td>100.0% (72.2% to 100.0%)<td>3<td>" in page


@pytest.mark.parametrize(("measured", "when"), [("rounds", [0, 1, 2, 3]), ("ends", [0, 3])])
def test_held_out_tasks_are_measured_when_the_plan_says(run: Any, measured: str, when: list[int]) -> None:
    run.plan = Plan(rounds=3, measured=measured)
    versions: list[int] = []
    run._prepare, run._measure = lambda: None, versions.append
    run._round = lambda number, groups: (run._policy / f"step-{number}.json").write_text("{}")
    assert run.go(float("inf"), lambda: None)
    assert versions == when


def test_a_run_does_not_end_because_its_page_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans(monkeypatch)
    a_run(tmp_path / "one")
    (tmp_path / "one" / "tasks.jsonl").unlink()
    assert main(["--folder", str(tmp_path / "two")]) == 0
    assert f"the page of {tmp_path} cannot be drawn: FileNotFoundError" in capsys.readouterr().out
    assert main(["page", str(tmp_path)]) == 1


def test_without_a_run_the_page_says_so(tmp_path: Path) -> None:
    assert "Nothing was measured yet" in write_page(tmp_path).read_text()


# ---------------------------------------------------------------- runs


class ScriptedProcess:
    """Ends with this code after a look or two. `does`: what it has then done."""

    starts, log = 0, Path("no.log")

    def __init__(self, code: int | None, does: Callable[[], object] = lambda: None) -> None:
        self._code, self._does, self._looks, self.stopped = code, does, 0, False

    def code(self) -> int | None:
        self._looks += 1
        if self._looks == 2:
            self._does()
        return self._code if self._looks > 1 else None

    def keep(self) -> None:
        self.starts += 1

    def stop(self) -> None:
        self.stopped = True

    def why(self, what: str) -> str:
        return what


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that starts nothing, and does not wait. `begun`: the commands it begins get the processes from there."""
    monkeypatch.setattr("examples.learn.rounds.WAITS_S", 0.001)
    monkeypatch.setattr("examples.learn.rounds.LATE_S", 0.01)
    said: list[str] = []
    one: Any = Run(Plan(groups=2), tmp_path, None, said.append)
    one.said, one.begun = said, []
    one._serve_model = lambda version: None
    one._orchestrator = lambda command, folder, *words: one.begun.pop(0)
    one._policy.mkdir()
    return one


def test_an_evaluation_goes_on_after_a_signal_and_for_samples_that_broke(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "eval-0"

    def found(answers: str) -> Callable[[], object]:
        def write() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            an_evaluation(folder, {"gcd": answers})
            (folder / "metrics.json").write_text("{}")

        return write

    ended = [ScriptedProcess(code) for code in (-9, -15)]
    run.begun = [*ended, ScriptedProcess(1, found("+x")), ScriptedProcess(0, found("++"))]
    run._measure(0)
    assert run.said == ["base model: 100.0% (34.2% to 100.0%) of 2 held-out tasks solved"]
    assert not run.begun

    shutil.rmtree(folder)
    run.begun = [ScriptedProcess(1, found("+x")) for _ in range(4)]
    run._measure(0)
    assert run.said[1].startswith("base model: 50.0%")
    assert run.said[1].endswith("of 2 held-out tasks solved; 1 of 2 samples broke and count as wrong")
    assert len(run.begun) == 1, "it went on twice, and not for ever"

    shutil.rmtree(folder)
    run.begun = [ScriptedProcess(3), ScriptedProcess(0)]
    with pytest.raises(Broken, match="gave up"):
        run._measure(0)


def test_an_evaluation_that_does_nothing_starts_again_and_not_for_ever(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.learn.processes.STILL_S", 0.01)
    hanging = [ScriptedProcess(None) for _ in range(9)]
    run.begun = list(hanging)
    with pytest.raises(Broken, match=f"did nothing for 0 minutes, {MOST_STALLS} times"):
        run._measure(0)
    assert sum(process.stopped for process in hanging) == MOST_STALLS


def rounds_processes(run: Any, missing: Iterable[int]) -> tuple[Any, list[int], list[Any]]:
    """The trainer of a round, how many groups `serve` is begun for, and what it is then. `missing`: how many
    groups the batch lacks, look by look; then the step is done."""
    trainer, asked, serves = ScriptedProcess(None), list[int](), list[Any]()
    looks = iter(missing)

    def lacks(api: object) -> int:
        if (count := next(looks, None)) is not None:
            return count
        (run._policy / "step-1.json").write_text("{}")
        return 0

    def serve(groups: int) -> Any:
        asked.append(groups)
        return serves.pop(0)

    run._trainer, run._missing, run._serve = trainer, lacks, serve
    run._run_api = lambda: ScriptedProcess(None)
    return trainer, asked, serves


def test_serve_is_not_begun_for_no_groups_while_a_killed_trainer_comes_back(run: Any) -> None:
    trainer, asked, serves = rounds_processes(run, [0, 2, 2, 2, *[0] * 200])
    serves += [ScriptedProcess(0)]
    run._trained(1)
    assert asked == [2]
    assert trainer.starts == 0, "counted anew with each step"


def test_what_was_lost_is_made_again_and_a_serve_that_was_ended_too(run: Any) -> None:
    _, asked, serves = rounds_processes(run, [2, 2, 2, 2, 2, *[1] * 100, 0])
    serves += [
        ScriptedProcess(-15),
        ScriptedProcess(1),
        ScriptedProcess(0),
        *(ScriptedProcess(None) for _ in "123"),
    ]
    run._trained(1)
    assert asked == [2, 2, 2, 1], "two ended before their work was done, and then one group was lost"


def test_a_round_without_a_batch_ends(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked, serves = rounds_processes(run, repeat(2))
    serves += [ScriptedProcess(0) for _ in range(20)]
    with pytest.raises(Broken, match="got no batch that it takes"):
        run._trained(1)
    assert len(asked) == MOST_STARTS
    serves[:] = [ScriptedProcess(3)]
    with pytest.raises(Broken, match="gave up"):
        run._trained(1)
    monkeypatch.setattr("examples.learn.processes.STILL_S", 0.01)
    hanging = [ScriptedProcess(None) for _ in range(9)]
    serves[:] = hanging
    with pytest.raises(Broken, match="did nothing"):
        run._trained(1)
    assert sum(process.stopped for process in hanging) == MOST_STALLS


@pytest.mark.parametrize("failure", [TimeoutError(), http.client.IncompleteRead(b"{"), ConnectionResetError()])
def test_a_run_api_that_does_not_answer_is_waited_for(
    run: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    waited: list[float] = []

    def fail(request: object, timeout: float) -> None:
        waited.append(timeout)
        raise failure

    monkeypatch.setattr("urllib.request.urlopen", fail)
    assert run._missing(ScriptedProcess(None)) == 0
    assert waited == [5], "meanwhile nobody looks after the other processes"


def plans(monkeypatch: pytest.MonkeyPatch, *, whole: bool = True) -> list[Any]:
    """The runs that are begun from now on; nothing is run."""
    begun: list[Any] = []

    def go(self: Any, until: float, page: Any) -> bool:
        begun.append(self)
        (self.folder / "learn.json").write_text(json.dumps(asdict(self.plan)))
        return whole

    monkeypatch.setattr("examples.learn.rounds.Run.go", go)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return begun


def test_kinds_of_runs_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = plans(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--seed", "2"], ["--control"], ["--algorithm", "expert"]):
        assert main(words) == 0
    names = [run.folder.name for run in begun]
    assert names == ["seed-1", "seed-2", "control-seed-1", "expert-seed-1"]


def test_a_run_does_not_change_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = plans(monkeypatch)
    given = ["--folder", str(tmp_path / "one")]
    assert main([*given, "--groups", "3", "--sets", "gcd+products"]) == 0
    assert main(given) == 0
    assert begun[0].plan == begun[1].plan
    assert begun[1].plan.sets == SETS
    with pytest.raises(SystemExit, match="began with groups 3; name another --folder"):
        main([*given, "--groups", "4"])


def test_a_curriculum_has_tasks_that_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = plans(monkeypatch)
    given = ["--folder", str(tmp_path / "one"), "--curriculum", "pools"]
    with pytest.raises(SystemExit, match="set --training N too"):
        main(given)
    assert main([*given, "--training", "3"]) == 0
    assert (begun[0].plan.curriculum, begun[0].plan.training) == ("pools", 3)


def test_trees_have_a_later_turn_to_fork_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = plans(monkeypatch)
    given = ["--folder", str(tmp_path / "one"), "--branch", "turns:2 width:3"]
    with pytest.raises(SystemExit, match="set --steps 2 or more too"):
        main(given)
    assert main([*given, "--steps", "2"]) == 0
    assert (begun[0].plan.branch, begun[0].plan.steps) == ("turns:2 width:3", 2)


def test_serve_gets_the_curriculum(run: Any, tmp_path: Path) -> None:
    words: list[object] = []
    run._orchestrator = lambda command, folder, *given: words.extend(given)
    run._serve(2)
    assert words[words.index("--env.curriculum") + 1] == "none"


def test_a_budget_of_tokens_ends_a_run_with_a_smaller_round(run: Any) -> None:
    run.plan = Plan(groups=10, rounds=8, tokens=2_500)
    assert run._due(1) == 10, "nothing was sampled yet"
    for number, (tokens, groups) in enumerate([(1_000, 10), (900, 9), (500, 5)], 1):
        told = {"groups": groups, "check": {"tokens": tokens}}
        (run._policy / f"step-{number}.json").write_text(json.dumps(told))
        assert run._due(number + 1) == {1: 10, 2: 6, 3: 1}[number], "by the tokens that are left"
    (run._policy / "step-3.json").write_text(json.dumps({"groups": 5, "check": {"tokens": 590}}))
    assert run._due(4) == 0, "less than half a group is left"
    (run._policy / "step-3.json").write_text(json.dumps({"groups": 5, "check": {"tokens": 0}}))
    assert run._due(4) == 10, "a round in which nothing was sampled"
    run.plan = Plan(groups=10, rounds=3)
    assert [run._due(number) for number in (1, 3, 4)] == [10, 10, 0]


def test_a_smaller_round_gets_a_trainer_for_smaller_batches(run: Any) -> None:
    trainer, _, _ = rounds_processes(run, [])
    told = {"reward": 0, "groups": 2, "groups_learned_from": 0, "losses": [], "check": {"mean": 0.0}}
    run._trained = lambda number: (run._policy / f"step-{number}.json").write_text(json.dumps(told))
    run._round(1, 2)
    assert run._trainer is trainer
    run._round(2, 1)
    assert trainer.stopped
    assert run._groups == 1


def test_the_end_of_the_time_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans(monkeypatch, whole=False)
    assert main(["--folder", str(tmp_path / "one")]) == 4
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "after the first round, begins none" in " ".join(capsys.readouterr().out.split())


def test_a_model_of_ones_own_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = plans(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["--folder", "one", "--model", "own.gguf"]) == 0
    assert begun[0].plan.model == str(tmp_path / "own.gguf")


def test_a_run_keeps_the_prompts_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = subprocess.CompletedProcess([], 0, json.dumps({"model": "m", "weights": "w", "tokenizer": "t"}))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: fetched)
    run = Run(Plan(sets=("gcd",)), tmp_path, None, lambda _: None)
    run._prepare()
    assert (tmp_path / "prompts.yaml").read_text() == PROMPTS.read_text()
    (tmp_path / "prompts.yaml").write_text("mine")
    run._prepare()
    assert (tmp_path / "prompts.yaml").read_text() == "mine"
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: commands.append(command))
    run._orchestrator("serve", tmp_path / "train")
    assert str(tmp_path / "prompts.yaml") in commands[0]


def test_two_do_not_learn_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = plans(monkeypatch)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["--folder", str(tmp_path)]) == 1
    assert not begun
    said = capsys.readouterr().out
    assert "another process learns in" in said
    assert "page" not in said


def test_a_plan_that_cannot_be_carried_out_is_told_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    fetched = subprocess.CompletedProcess([], 0, json.dumps({"model": "m", "weights": "w", "tokenizer": "t"}))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: fetched)
    assert main(["--folder", str(tmp_path / "one"), "--sets", "nope"]) == 1
    assert "reasoning_gym has no data set 'nope'" in capsys.readouterr().out
    assert not (tmp_path / "one" / "learn.json").exists()
    with pytest.raises(SystemExit):
        main(["--groups", "0"])
    assert "0 is not above 0" in capsys.readouterr().err
