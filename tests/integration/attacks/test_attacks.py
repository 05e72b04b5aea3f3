"""Every attack of the catalogue as steps of real agents in real containers, beside control rollouts, in one run.

What must hold: each attack ends as its catalogue entry says, scores nothing by it, and leaves no container; the
controls are alike to the last token; it is one orchestrator process from start to end, of flat memory and
descriptors; keys and reference answers are nowhere in the sandboxes, nor in what the Engine tells of them.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import docker
import pytest
from docker.utils import kwargs_from_env

from orchestrator.launch.names import DEFAULT_IMAGE
from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.leftovers import containers_of
from tests.fakes import oci_images
from tests.fakes.plans import WAIVED_WITHOUT_ROOT
from tests.fakes.runs import Ended, flags, lines, place, running
from tests.integration.attacks.catalogue import ALIVE, ATTACKS, WRONG, Attack
from tests.integration.attacks.root_inside import ATTACKS_OF_ROOT, STORAGE
from tests.integration.attacks.witness import RuntimeEyes, Witness, engine_eyes

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

DEADLINE_S = 1000.0  # under a minute on two quiet cores
KINDS: Mapping[str, Mapping[str, Attack]] = {
    "docker": ATTACKS,
    "oci": ATTACKS,
    "oci-fork": ATTACKS,
    "oci-writable": ATTACKS_OF_ROOT,
    "oci-fork-writable": ATTACKS_OF_ROOT,
}
CONTROLS = 8
CONTROL = "control"
CONTROL_STEPS = [f"import time\nt = {n}\ntime.sleep(0.1)\nprint('worked', t)" for n in range(3)]
MAX_GROWTH_BYTES = 160 << 20
MAX_MORE_DESCRIPTORS = 24
MAX_GONE_S = 60.0  # a guard against what stays; on a quiet machine it is well under a second
WRONG_AT_MOST = 0.45  # what `combined` gives a wrong answer at most


def canary() -> str:
    return f"canary-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Run:
    """A finished run, and all that was seen of it."""

    launcher: str
    attacks: Mapping[str, Attack]
    ended: Ended
    rollouts: Mapping[str, dict[str, Any]]
    unscored: list[tuple[str, str, str]]  # attempts: task, outcome, reason
    witness: Witness
    keys: Mapping[str, str]
    truths: Mapping[str, str]
    prompts: str
    left: list[str]
    files: Mapping[str, bytes]


def turns(attack: Attack) -> list[str]:
    said = [says("I attack.", code) for code, _ in attack.steps]
    if attack.goes_on:
        said += [says("Still here?", ALIVE[0]), answers(repr(WRONG))]
    return said


def tasks(attacks: Mapping[str, Attack]) -> Iterator[dict[str, Any]]:
    """Attackers, with controls between them."""
    every = max(1, len(attacks) // CONTROLS)
    for number, (name, attack) in enumerate(attacks.items()):
        if number % every == 0 and number // every < CONTROLS:
            control = f"{CONTROL} {number // every}"
            yield {"task_id": control, "question": f"{CONTROL}: what is 6 times 7?", "answer": "42"}
        task = {"task_id": name, "question": f"attack by [{name}]", "answer": canary(), "files": ["given.txt"]}
        yield task | ({"limits": dict(attack.limits)} if attack.limits else {})


# All but one kind of sandbox are of `make test-long`.
MARKS = {kind: [pytest.mark.slow] if kind != "docker" else [] for kind in KINDS}


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=marks) for kind, marks in MARKS.items()])
def run(request: pytest.FixtureRequest) -> Run:
    kind: str = request.param
    if kind != "docker":
        if (reason := oci_images.why_not()) is not None:
            pytest.skip(reason)
        oci_images.stored_image()
    return run_of(kind)


@cache  # pytest makes a fixture anew for each set of parameters that a test names itself
def run_of(kind: str) -> Run:
    return asyncio.run(carried_out(kind))


async def carried_out(kind: str) -> Run:
    launcher, _, how = kind.partition("-")
    writable = "writable" in how
    attacks = KINDS[kind]
    keys = {"OPENAI_API_KEY": canary(), "TAVILY_API_KEY": canary()}
    script = {f"[{name}]": [turns(attack)] for name, attack in attacks.items()}
    script[CONTROL] = [[*(says("Work.", code) for code in CONTROL_STEPS), answers("42")]]
    with ExitStack() as stack:
        home = stack.enter_context(place())
        (home / "given.txt").write_text("a file of the task")
        rows = list(tasks(attacks))
        (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        endpoint = stack.enter_context(
            scripted_endpoint(script, "--dialect", "vllm", "--api-key", keys["OPENAI_API_KEY"])
        )
        command = flags(
            home,
            endpoint.base_url,
            launcher=launcher,
            group_size=1,
            max_concurrent_sandboxes=4,
            sandbox_memory="512MiB",
            step_timeout=240,  # what fills memory may take minutes in a slow kernel (`make test-cgroup2`)
            max_steps=26,
            max_token_length=200_000,
            max_output_chars=2_000,
            max_tool_calls=5,
            tavily_base_url="http://127.0.0.1:9",
            start="fork" if "fork" in how else None,
            waive_hardening=json.dumps([*WAIVED_WITHOUT_ROOT]) if writable else None,
            **({"sandbox_root": "writable", "sandbox_storage": STORAGE} if writable else {}),
        )
        async with running(*command, directory=home, environ=keys | oci_images.CACHE) as started:
            pid = started.process.pid
            seeing = engine_eyes(pid) if launcher == "docker" else nullcontext(RuntimeEyes(started.temporary))
            with seeing as eyes, Witness(pid, home / "run" / "rollouts.jsonl", eyes) as witness:
                async with asyncio.timeout(DEADLINE_S):
                    out, err = await started.process.communicate()
                ended = Ended(started.process.returncode or 0, out.decode(), err.decode())
        return Run(
            launcher=launcher,
            attacks=attacks,
            ended=ended,
            rollouts={line["task_id"]: line for line in lines(home / "run" / "rollouts.jsonl")},
            unscored=[
                (line["task_id"], line["outcome"], line["reason"])
                for line in lines(home / "run" / "rollouts.jsonl")
                if line["score"] is None
            ],
            witness=witness,
            keys=keys,
            truths={row["task_id"]: row["answer"] for row in rows},
            prompts=json.dumps([served["call"] for served in endpoint.completions()]),
            left=containers_of(pid) if launcher == "docker" else [*map(str, started.temporary.iterdir())],
            files={p.name: p.read_bytes() for p in (home / "run").rglob("*") if p.is_file()},
        )


def observations(rollout: Mapping[str, Any]) -> list[str]:
    """What the agent was told after each step that another completion followed."""
    return [completion["messages"][-1]["content"] for completion in rollout["completions"][1:]]


def test_one_process_carried_all_of_it_out_and_nothing_is_left(run: Run) -> None:
    assert run.ended.code == 0, run.ended.stderr
    assert not run.ended.traceback, run.ended.stderr
    assert run.left == []
    assert len(run.rollouts) == len(run.attacks) + CONTROLS
    assert run.unscored == []


@pytest.mark.parametrize(
    ("run", "name"),
    [pytest.param(kind, name, marks=MARKS[kind]) for kind, attacks in KINDS.items() for name in attacks],
    indirect=["run"],
)
def test_the_attack_is_contained_and_earns_nothing(run: Run, name: str) -> None:
    attack, rollout = run.attacks[name], run.rollouts[name]
    assert rollout["outcome"] == attack.outcome, (rollout["reason"], observations(rollout))
    assert rollout["answer"] == attack.answer
    assert attack.reason in (rollout["reason"] or "")
    assert rollout["score_parts"]["correctness"] == 0.0
    assert rollout["score"] <= WRONG_AT_MOST
    told = observations(rollout)
    for (code, expected), observed in zip(attack.steps, told, strict=False):
        assert expected in observed, f"{code}\n--> {observed}"
    if attack.goes_on:
        assert any(ALIVE[1] in observed for observed in told[-1:]), told
        assert len(rollout["completions"]) == len(attack.steps) + 2


def test_what_was_changed_is_on_record(run: Run) -> None:
    if run.attacks is not ATTACKS_OF_ROOT:
        assert [name for name, rollout in run.rollouts.items() if "changes" in rollout] == []
        return
    unknown = {name: rollout["notes"] for name, rollout in run.rollouts.items() if "changes" not in rollout}
    assert unknown == {}
    changes = {name: rollout["changes"] for name, rollout in run.rollouts.items()}
    assert changes["exhaustion, inodes"]["count"] > 90_000
    assert len(changes["exhaustion, inodes"]["changes"]) == 500
    named = changes["root inside, what overlayfs reads"]
    assert named["left_out"]["name"] == 2  # called as layers mark what they remove
    assert {change["path"] for change in named["changes"]} >= {"/etc/work", "/etc/index"}
    # Control characters, bytes that are no UTF-8, a lone surrogate, and a path that is too long.
    assert changes["root inside, names"]["left_out"]["name"] == 32 + 128 + 1 + 1
    assert changes["root inside, links"]["left_out"]["link"] == 2
    assert changes[f"{CONTROL} 0"]["count"] == 0


def test_the_controls_are_alike_to_the_last_token(run: Run) -> None:
    def essence(rollout: Mapping[str, Any]) -> str:
        completions = [
            {name: c[name] for name in ("messages", "prompt_ids", "tokens", "text") if name in c}
            for c in rollout["completions"]
        ]
        kept = {name: rollout[name] for name in ("outcome", "answer", "score", "score_parts", "tool_calls")}
        return json.dumps(
            [kept, completions, [(s["code"], s["observations"], s["error"]) for s in rollout["steps"]]]
        )

    controls = [run.rollouts[f"{CONTROL} {number}"] for number in range(CONTROLS)]
    assert controls[0]["outcome"] == "finished"
    assert controls[0]["score_parts"]["correctness"] == 1.0
    assert len({essence(control) for control in controls}) == 1


def test_memory_and_descriptors_stay_flat(run: Run) -> None:
    busy = [sample for sample in run.witness.samples if sample.rollouts >= 4]
    assert len(busy) > 4
    first, most = busy[0], max(sample.rss_bytes for sample in busy)
    descriptors = [sample.descriptors for sample in busy]
    print(
        f"orchestrator RSS {first.rss_bytes >> 20} MiB, at most {most >> 20} MiB; "
        f"descriptors {first.descriptors}, at most {max(descriptors)}"
    )
    assert most - first.rss_bytes < MAX_GROWTH_BYTES
    # Four sandboxes at a time, some descriptors each: a leak of one per rollout would show.
    assert max(descriptors) <= max(descriptors[: len(descriptors) // 4]) + MAX_MORE_DESCRIPTORS


def test_containers_go_when_their_rollout_has_ended(run: Run) -> None:
    late = {}
    for name, rollout in run.rollouts.items():
        sandbox = rollout["sandbox"]["id"]
        if sandbox in run.witness.gone_at:
            late[name] = run.witness.gone_at[sandbox] - (rollout["started_at"] + rollout["duration_s"])
    assert len(late) >= len(run.rollouts) // 2  # the last ones go while nobody looks any more
    print(
        f"containers gone after p50 {statistics.median(late.values()):.2f} s, at most {max(late.values()):.2f} s"
    )
    assert max(late.values()) < MAX_GONE_S, late


def test_keys_and_reference_answers_are_nowhere(run: Run) -> None:
    if run.launcher == "docker":
        with closing(docker.APIClient(**kwargs_from_env())) as client:
            image = json.dumps([client.inspect_image(DEFAULT_IMAGE), client.history(DEFAULT_IMAGE)])
    else:
        image = json.dumps(dict(oci_images.stored_image().config))
    assert any("inspected" in name for name in run.witness.texts)
    outside = {**run.witness.texts, "image": image, "stdout": run.ended.stdout, "stderr": run.ended.stderr}
    form = re.compile(r"canary-[0-9a-f]{16}")
    assert {where: form.findall(text) for where, text in outside.items() if form.search(text)} == {}
    assert form.findall(run.prompts) == []
    for where, content in run.files.items():
        for name, key in run.keys.items():
            assert key.encode() not in content, f"{name} is in {where}"
    told = json.dumps([[r["completions"], r["tool_calls"], r["steps"]] for r in run.rollouts.values()])
    assert [name for name, truth in run.truths.items() if truth != "42" and truth in told] == []
