"""What rollouts under way were served is beside the record, is read back, and is checked as it is."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from orchestrator.run.directory import RunDirectory
from orchestrator.run.under_way import FOLDER, UnderWay, served_so_far, under_way_in
from orchestrator.types import (
    Attempt,
    Ended,
    EndedName,
    Entry,
    Failed,
    FailedName,
    Message,
    Parting,
    Prefix,
    Record,
    RolloutPlan,
    ToolCall,
    Turn,
    conversations,
    going_on,
)
from tests.fakes.plans import TALK, a_plan, a_turn

CALL = ToolCall(1, "search", {"query": "x"}, "found", None, 1.5, 1.6)
SPAN = 2.0


def turns(count: int) -> list[Turn]:
    """Each prompt adds two messages to the one before."""
    made = []
    for at in range(count):
        more = TALK if not at else (Message("assistant", f"said {at}"), Message("user", f"seen {at}"))
        kept = 0 if not at else len(TALK) + 2 * (at - 1)
        times = {"started_s": at * SPAN, "ended_s": at * SPAN + 1}
        tools: Any = ({"type": "function", "function": {"name": "search"}},) if at else ()
        made.append(replace(a_turn(f"said {at + 1}", at + 1), kept=kept, messages=more, tools=tools, **times))
    return made


async def written(folder: Path, entries: list[Entry], plan: RolloutPlan | None = None) -> Path:
    """The file after a kill."""
    plan = a_plan() if plan is None else plan
    under_way = UnderWay(folder)
    for one in entries:
        under_way.served(plan, 1000.0, one)
    under_way.close()
    return folder / f"{plan.rollout_id}.jsonl"


async def read(folder: Path, plan: RolloutPlan | None = None, *earlier: str) -> Record | None:
    plan = a_plan() if plan is None else plan
    with closing(UnderWay(folder)) as under_way:
        return await under_way.record(plan, (plan.rollout_id, *earlier))


async def test_what_was_served_is_read_back_as_it_was(tmp_path: Path) -> None:
    first, second, third = turns(3)
    await written(tmp_path / FOLDER, [first, CALL, second, third])
    assert await read(tmp_path / FOLDER) == Record(1000.0, (first, second, third), (CALL,))
    (one,) = under_way_in(tmp_path)
    assert one[0] == a_plan().rollout_id
    assert one[1].sampled_tokens == sum(turn.completion.completion_tokens for turn in (first, second, third))


async def test_what_a_rollout_was_served_so_far_is_read_while_it_is_written(tmp_path: Path) -> None:
    (first,) = turns(1)
    plan = a_plan()
    assert served_so_far(tmp_path, plan.rollout_id) is None
    path = await written(tmp_path / FOLDER, [first, CALL])
    with path.open("ab") as file:
        file.write(b'{"turn": {"text": "half of')
    assert served_so_far(tmp_path, plan.rollout_id) == Record(1000.0, (first,), (CALL,))
    path.write_bytes(b"no record\n")
    assert served_so_far(tmp_path, plan.rollout_id) is None


async def test_completions_that_overtook_each_other_come_in_the_order_in_which_they_were_asked_for(
    tmp_path: Path,
) -> None:
    first, second, third = turns(3)
    talks = list(conversations([first, second, third]))
    served = [first, replace(third, kept=0, messages=talks[2]), replace(second, kept=0, messages=talks[1])]
    await written(tmp_path, [*served])
    assert await read(tmp_path) == Record(1000.0, (first, second, third))


async def test_a_completion_that_was_given_up_later_is_so_on_record(tmp_path: Path) -> None:
    first, second = turns(2)
    talk = list(conversations([first, second]))[1]
    await written(tmp_path, [first, second, replace(second, kept=len(talk), messages=(), abandoned=True)])
    record = await read(tmp_path)
    assert record is not None
    assert [turn.abandoned for turn in record.turns] == [False, True]
    prefix = going_on(record, "")
    assert prefix is not None
    assert prefix.turns == record.turns

    again = replace(a_plan(attempt=1), prefix=prefix)
    under_way = UnderWay(tmp_path)
    await under_way.record(a_plan(attempt=1), ("g000000-r00-a1", "g000000-r00-a0"))
    other = replace(
        turns(2)[1], sequence=3, kept=0, messages=(*talk[:-1], Message("user", "another")), started_s=9.0
    )
    under_way.served(again, 1000.0, other)
    under_way.close()
    record = await read(tmp_path, a_plan(attempt=1), "g000000-r00-a0")
    assert record is not None
    assert record.turns[:2] == prefix.turns
    assert [turn.messages[-1].content for turn in record.turns[2:]] == ["another"]


async def test_a_rollout_that_went_on_twice_is_read_back_whole_and_parted_where_it_parted(tmp_path: Path) -> None:
    first, second, third = turns(3)
    await written(tmp_path, [first, second])
    record = await read(tmp_path)
    assert record is not None
    again = replace(a_plan(attempt=1), prefix=going_on(record, "it is gone"))
    under_way = UnderWay(tmp_path)
    assert await under_way.record(a_plan(attempt=1), ("g000000-r00-a1", "g000000-r00-a0")) == record
    talk = list(conversations([first, second, third]))[2]
    under_way.served(again, 1000.0, replace(third, kept=0, messages=talk))
    under_way.close()
    whole = await read(tmp_path, a_plan(attempt=1), "g000000-r00-a0")
    assert whole is not None
    assert whole.turns == (first, second, third)
    assert [one.turn for one in whole.continued] == [2]

    last: Prefix | None = going_on(whole, "gone again")
    parts = replace(a_plan(attempt=1), prefix=last)
    under_way = UnderWay(tmp_path)
    await under_way.record(a_plan(attempt=1), ("g000000-r00-a1", "g000000-r00-a0"))
    under_way.served(parts, 1000.0, Parting((0,), "prompt 2 is another one"))
    talk = list(conversations([first, second]))[1]
    other = replace(second, kept=0, messages=(*talk[:-1], Message("user", "another")))
    under_way.served(parts, 1000.0, other)
    under_way.close()
    parted = await read(tmp_path, a_plan(attempt=1), "g000000-r00-a0")
    assert parted is not None
    assert [turn.messages[-1].content for turn in parted.turns] == [first.messages[-1].content, "another"]
    assert [(one.turn, one.refused) for one in parted.continued] == [(2, ""), (1, "prompt 2 is another one")]


async def test_half_a_line_is_no_turn_and_what_follows_is_whole(tmp_path: Path) -> None:
    first, second = turns(2)
    path = await written(tmp_path, [first, second])
    path.write_bytes(path.read_bytes()[:-10])
    assert await read(tmp_path) == Record(1000.0, (first,))
    assert path.read_bytes().endswith(b"\n")


FORGED: dict[str, Any] = {
    "no JSON": lambda text: text.replace(b'"turn":', b'"turn"'),
    "no head": lambda text: text.split(b"\n", 1)[1],
    "another rollout": lambda text: text.replace(b"g000000-r00-a0", b"g000009-r09-a9"),
    "another task": lambda text: text.replace(b'"task_id":"task"', b'"task_id":"other"'),
    "another seed": lambda text: text.replace(b'"seed":0', b'"seed":1'),
    "another agent": lambda text: text.replace(b'"max_steps":', b'"max_steps":9'),
    "ids without log-probs": lambda text: text.replace(b'"token_ids":null', b'"token_ids":[1,-2]'),
    "nothing to go on with": lambda text: text.replace(
        b'"continued":[]', b'"continued":[{"turn":1,"tokens":1,"reason":"x","refused":""}]'
    ),
    "a parting of nothing": lambda text: text + b'{"parting":{"turns":0,"why":"x"}}\n',
    "another schema": lambda text: text.replace(b'"schema":1', b'"schema":7'),
    "a bomb": lambda text: text + b'{"turn":' + b"[" * 2_000_000 + b"\n",
    "prompts without end": lambda text: text + again(text, 0, 100_000) + 40 * again(text, 100_000, 0),
}


async def test_a_rollout_that_is_drawn_again_is_not_written_behind_half_a_line(tmp_path: Path) -> None:
    first, second = turns(2)
    path = await written(tmp_path, [first])
    path.write_bytes(path.read_bytes()[:-20])  # nothing of it is whole
    assert await read(tmp_path) is None
    await written(tmp_path, [first, second])
    assert await read(tmp_path) == Record(1000.0, (first, second))


def again(text: bytes, kept: int, more: int) -> bytes:
    """The last completion with this conversation."""
    line = orjson.loads(text.splitlines()[-1])
    line["turn"] |= {"kept": kept, "messages": [{"role": "user", "content": ""}] * more}
    return orjson.dumps(line) + b"\n"


@pytest.mark.parametrize(
    "forged", [pytest.param(name, marks=[pytest.mark.slow] if "without end" in name else []) for name in FORGED]
)
async def test_what_is_no_record_of_the_rollout_is_left_out_by_name(
    tmp_path: Path, forged: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = await written(tmp_path, [*turns(2)])
    changed = FORGED[forged](path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert await read(tmp_path) is None
    assert str(path) in caplog.text
    assert not path.exists()


async def test_a_link_is_left_out(tmp_path: Path) -> None:
    path = await written(tmp_path / "other", [*turns(1)])
    (tmp_path / FOLDER).mkdir()
    link = tmp_path / FOLDER / path.name
    link.symlink_to(path)
    assert await read(tmp_path / FOLDER) is None
    assert path.exists()
    assert not link.is_symlink()


async def test_a_full_disk_costs_a_file_and_no_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    await written(tmp_path / FOLDER, [*turns(3)])
    assert caplog.text.count("is not written on") == 1


async def test_the_file_is_there_while_no_line_has_its_turns(tmp_path: Path) -> None:
    first, second = turns(2)
    with closing(RunDirectory(tmp_path)) as run:
        plans = [a_plan(index) for index in range(3)]
        for plan in plans:
            run.served(plan, 1000.0, first)
            run.served(plan, 1000.0, second)
        record = Record(1000.0, (first, second))
        ended = Ended(EndedName.FINISHED)
        cancelled = Failed(FailedName.CANCELLED, "stopped")
        await run.record(Attempt(plans[0], record, ended))
        await run.record(Attempt(plans[1], record, cancelled, ended))  # it lacks its score alone
        await run.record(Attempt(plans[2], Record(1000.0), cancelled))
        assert [path.stem for path in (tmp_path / FOLDER).iterdir()] == [plans[2].rollout_id]
        following = a_plan(2, attempt=1)
        assert await run.under_way(following, (following.rollout_id, plans[2].rollout_id)) == record
        assert [path.stem for path in (tmp_path / FOLDER).iterdir()] == [following.rollout_id]
        await run.record(Attempt(following, record, ended))
    assert not (tmp_path / FOLDER).exists()


async def test_the_event_loop_is_not_held_up(tmp_path: Path) -> None:
    """A thousand completions of a thousand tokens are told while the disk takes none of them."""
    completion = replace(
        a_turn().completion, tokens_T=tuple(range(1000)), logprobs_T=(-0.123456789,) * 1000, completion_tokens=1000
    )
    turn = replace(a_turn(), completion=completion)
    under_way, disk = UnderWay(tmp_path), threading.Event()
    under_way._thread.submit(disk.wait)
    plans = [a_plan(index) for index in range(50)]
    for at in range(1000):
        under_way.served(plans[at % 50], 1000.0, replace(turn, sequence=at))
    assert not any(tmp_path.iterdir())
    disk.set()
    await asyncio.to_thread(under_way.close)
    lines = sum(len(path.read_bytes().splitlines()) for path in tmp_path.iterdir())
    assert lines == 1000 + 50
    assert all(orjson.loads(path.read_bytes().splitlines()[0])["schema"] == 1 for path in tmp_path.iterdir())
