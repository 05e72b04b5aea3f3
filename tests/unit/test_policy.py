"""Versions of the policy: their order, staleness, what a server's words are worth."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.atropos.policy_service import policy_service
from orchestrator.completion.base import Endpoint, Refusal
from orchestrator.completion.http import HttpClient
from orchestrator.completion.retry import ConnectionFailed, Retryable
from orchestrator.completion.versions import (
    Attribution,
    Question,
    llamacpp_adapters,
    told_spans,
    version_text,
    vllm_version,
)
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.errors import CompletionTimeout, ConfigError, EnvironmentUnusable
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.policy import Policy, Served, joined
from orchestrator.run.groups import scored_data_group
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.terminal.closing import dropped_text
from orchestrator.types import (
    Attempt,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Group,
    Member,
    Message,
    PolicySpan,
    Record,
    Score,
    Trajectory,
    Turn,
)
from tests.fakes.plans import a_plan
from tests.fakes.trainers import free_port


def spans(*told: tuple[int, str | None, str | None]) -> tuple[PolicySpan, ...]:
    return tuple(PolicySpan(*one) for one in told)


# ---------------------------------------------------------------- how far behind


@pytest.mark.parametrize(
    ("seen", "version", "behind"),
    [
        (["3", "5"], "3", 2),
        (["5", "3"], "3", 2),
        (["step-9", "step-12"], "step-9", 3),
        (["a", "b", "c"], "a", 2),
        (["a", "b", "c"], "c", 0),
        (["3", "5"], "4", 1),
        (["base", "lora-1", "lora-4"], "base", 2),
        (["a"], "never seen", None),
        ([], "a", None),
        (["a"], None, None),
    ],
)
def test_versions_with_numbers_are_as_far_apart_as_these_and_others_by_their_order(
    seen: list[str], version: str | None, behind: int | None
) -> None:
    policy = Policy()
    for one in seen:
        policy.saw(one)
    assert policy.behind(version) == behind


async def test_what_a_trainer_named_last_is_the_newest_whatever_was_seen() -> None:
    policy = Policy()
    policy.saw("9")
    await policy.serve("7")
    assert (policy.newest, policy.behind("6"), policy.behind("9")) == ("7", 1, 0)


def test_staleness_is_that_of_the_oldest_span_and_unknown_where_one_is_unknown() -> None:
    policy = Policy()
    for version in ("1", "2", "5"):
        policy.saw(version)
    assert policy.staleness(spans((3, "5", "5"), (2, "2", "5"))) == 3
    assert policy.staleness(spans((3, "5", "5"), (2, None, "5"))) is None
    assert policy.staleness(spans((3, "5", "5"), (0, None, None))) == 0
    assert policy.staleness(spans((3, "2", None))) == 3
    assert policy.staleness(spans((3, "5", "2"))) == 3, "a server that went back to older weights"
    assert policy.staleness(()) is None


async def test_serve_returns_when_everybody_knows() -> None:
    policy, told = Policy(), []

    async def slow(served: Served) -> None:
        await asyncio.sleep(0.01)
        told.append(served)

    policy.changed(slow)
    await policy.serve("1", "lora-1")
    assert told == [Served("1", "lora-1")]


async def test_a_trainers_version_may_be_a_number() -> None:
    policy = Policy()
    await policy.serve(7)
    assert policy.served == Served("7")
    await policy.serve("9")
    assert policy.behind("7") == 2


@pytest.mark.parametrize(
    ("version", "model"),
    [("", None), (None, None), (True, None), (7.5, None), (" 7", None), ("7\n8", None), ("\ud800", None),
     ("7" * 201, None), ("7", ""), ("7", 7), ("7", "a\x1b[2J")],
)  # fmt: skip
async def test_what_is_no_version_or_name_is_refused_in_the_library_too(version: Any, model: Any) -> None:
    policy = Policy()
    with pytest.raises(ConfigError, match=r"a policy's (version|model) is text of 1 to 200 characters"):
        await policy.serve(version, model)
    assert (policy.served, policy.newest) == (Served(), None)


def test_a_flood_of_versions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.rules.policy.MOST_KNOWN", 10)
    policy = Policy()
    for number in range(100):
        policy.saw(f"v{number}x")
    assert len(policy._known) == 10
    assert policy.behind("v98x") == 1


# ---------------------------------------------------------------- spans


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), max_size=20), st.integers(0, 120))
def test_joined_spans_say_the_same_of_every_token(told: list[tuple[int, str]], tokens: int) -> None:
    whole = spans(*((count, version, version) for count, version in told))
    found = joined(whole, tokens)
    assert [s.version for s in found for _ in range(s.tokens)] == [v for n, v in told for _ in range(n)][:tokens]
    assert all(one.version != other.version for one, other in itertools.pairwise(found))
    assert all(span.tokens for span in found)


def test_a_completion_keeps_spans_only_where_they_say_more_than_its_version() -> None:
    one = Completion("ab", "ab", "stop", (1, 2), (-1.0, -1.0), 3, 2)
    assert one.sampled_from(spans((2, "4", "4"))).spans == ()
    assert one.sampled_from(spans((2, "4", "4"))).policy_version == "4"
    assert one.sampled_from(spans((2, "4", "5"))).spans == spans((2, "4", "5"))
    assert one.sampled_from(()).sampled_by == spans((2, None, None))
    with pytest.raises(ValueError, match="2 tokens but spans of 3"):
        one.sampled_from(spans((1, "4", "4"), (2, "5", "5")))
    with pytest.raises(ValueError, match="a span of -1 tokens"):
        PolicySpan(-1, None, None)


# ---------------------------------------------------------------- what servers say


def test_sglangs_spans_are_read() -> None:
    told = [{"version": "3", "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 5}]
    assert told_spans(told, 5) == spans((2, "3", "3"), (3, "4", "4"))
    assert told_spans(None, 5) == ()
    assert told_spans([], 0) == ()


@pytest.mark.parametrize(
    "told",
    [
        "3",
        {"version": "3"},
        [{"version": "3", "start": 0, "end": 4}],
        [{"version": "3", "start": 1, "end": 5}],
        [{"version": "3", "start": 0, "end": 9}],
        [{"version": "3", "start": 0, "end": 3}, {"version": "4", "start": 2, "end": 5}],
        [{"version": "3", "start": 0, "end": "5"}],
        [{"version": "3", "start": 0, "end": -1}],
        [{"start": 0, "end": 5}],
        [{"version": "3", "start": 0, "end": 5.0}],
        [[]],
        [None],
        [],
        [{"version": "3", "start": n, "end": n + 1} for n in range(2000)],
    ],
)
def test_spans_that_do_not_cover_the_completion_tell_nothing(told: Any) -> None:
    assert told_spans(told, 5) == ()


def test_of_a_span_whose_version_is_none_the_version_is_not_known() -> None:
    told = [{"version": ["3"], "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]
    assert told_spans(told, 5) == spans((2, None, None), (3, "4", "4"))


def test_versions_are_text_of_bounded_length_or_unknown() -> None:
    assert version_text(7) == "7"
    assert version_text(None) is version_text("") is None
    assert version_text(0) == "0"
    assert version_text("\ud800") == "\ufffd", "else the record could not be written"
    assert len(version_text("x" * 10_000) or "") == 200
    assert [version_text(odd) for odd in (True, [], {})] == [None] * 3


def test_adapters_are_told_by_name_and_scale_whatever_their_order() -> None:
    one = [{"id": 0, "path": "/a/x.gguf", "scale": 1.0}, {"id": 1, "path": "y.gguf", "scale": 0}]
    assert llamacpp_adapters(one) == llamacpp_adapters(one[::-1])
    assert llamacpp_adapters([one[0], {**one[1], "scale": 0.5}]) == '["/a/x.gguf x 1.0", "y.gguf x 0.5"]'
    assert llamacpp_adapters([{**one[0], "scale": 0}]) == "[]"
    assert llamacpp_adapters([]) is None


def test_one_adapter_in_full_use_is_a_version_that_can_be_counted() -> None:
    policy = Policy()
    for number in (3, 9, 11):
        policy.saw(in_use((f"/run/policy-{number}.gguf", 1.0)))
    assert policy.newest == "/run/policy-11"
    assert policy.behind("/run/policy-3") == 8


def in_use(*adapters: tuple[str, float]) -> str | None:
    return llamacpp_adapters([{"id": n, "path": path, "scale": scale} for n, (path, scale) in enumerate(adapters)])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([("/a/x.gguf", 1.0)], [("/a/x.gguf", 0.5)]),
        ([("/a/x.gguf", 1.0)], [("/a/x.gguf", 1.0000001)]),
        ([("/step-1/adapter.gguf", 1.0), ("/step-2/adapter.gguf", 0.0)],
         [("/step-1/adapter.gguf", 0.0), ("/step-2/adapter.gguf", 1.0)]),
        ([(f"/lora/number-{n:02}.gguf", 1.0) for n in range(50)],
         [(f"/lora/number-{n:02}.gguf", 1.0 + (n == 49)) for n in range(50)]),
    ],
)  # fmt: skip
def test_no_change_of_adapters_goes_unnoticed(
    before: list[tuple[str, float]], after: list[tuple[str, float]]
) -> None:
    assert in_use(*before) != in_use(*after)
    assert max(len(told or "") for told in (in_use(*before), in_use(*after))) <= 200


# ---------------------------------------------------------------- whose word counts


class Says:
    """A server's answers to the question for its version, one after the other."""

    def __init__(self, *versions: str | None) -> None:
        self.versions = list(versions)

    async def now(self) -> str | None:
        return self.versions.pop(0)


async def attributed(
    attribution: Attribution, tokens: int = 5, told: tuple[PolicySpan, ...] = (), version: str | None = None
) -> tuple[PolicySpan, ...]:
    return await attribution.spans(await attribution.before(), tokens, told, version)


async def test_a_server_that_is_asked_before_and_after() -> None:
    attribution = Attribution(Policy(), Says("1", "1", "1", "2", "2", None))  # type: ignore[arg-type]
    assert await attributed(attribution) == spans((5, "1", "1"))
    assert await attributed(attribution) == spans((5, "1", "2"))
    assert await attributed(attribution) == spans((5, "2", None))


async def test_a_server_that_says_its_last_version_may_have_had_another_before() -> None:
    attribution = Attribution(Policy())
    assert await attributed(attribution, version="1") == spans((5, "1", "1"))
    assert await attributed(attribution, version="2") == spans((5, "1", "2"))
    assert await attributed(attribution, version="2") == spans((5, "2", "2"))


async def test_an_answer_without_a_version_does_not_make_the_one_before_unknown() -> None:
    attribution = Attribution(Policy())
    await attributed(attribution, told=spans((5, "1", "1")))
    assert await attributed(attribution, told=spans((5, None, None))) == ()
    assert await attributed(attribution, version="2") == spans((5, "1", "2"))


async def test_a_request_that_was_sent_before_another_heard_of_new_weights_may_be_of_the_old_ones() -> None:
    attribution = Attribution(Policy())
    await attributed(attribution, version="1")
    early = await attribution.before()
    await attributed(attribution, version="2")
    assert await attribution.spans(early, 5, (), "2") == spans((5, "1", "2"))


async def test_what_a_trainer_says_counts_where_the_server_says_nothing() -> None:
    policy = Policy()
    attribution = Attribution(policy)
    assert await attributed(attribution) == ()
    await policy.serve("1")
    assert await attributed(attribution) == spans((5, "1", "1"))
    before = await attribution.before()
    await policy.serve("2")
    assert await attribution.spans(before, 5, (), None) == spans((5, "1", "2"))
    assert await attribution.spans(before, 5, (), "default") == spans((5, "1", "2")), "nobody has set it there"
    assert await attribution.spans(before, 5, (), "weights-2") == spans((5, "weights-2", "weights-2"))


async def test_a_server_that_nobody_tells_its_versions_leaves_them_to_the_trainer() -> None:
    """SGLang tells `default` of each token then."""
    policy = Policy()
    attribution, unset = Attribution(policy), spans((3, "default", "default"), (2, "default", "default"))
    assert await attributed(attribution, told=unset) == unset
    await policy.serve("1")
    assert await attributed(attribution, told=unset) == spans((5, "1", "1"))
    some = spans((3, "default", "default"), (2, "7", "7"))
    assert await attributed(attribution, told=some) == some


async def test_a_server_that_does_not_answer_once_leaves_what_it_was_not_told_to_the_trainer() -> None:
    """Else the trainer's newest weights would count as the oldest of all, and their group as too old."""
    policy = Policy()
    attribution = Attribution(policy, Says("default", "default", "default", None, "default", "8"))  # type: ignore[arg-type]
    assert await attributed(attribution) == spans((5, "default", "default"))
    await policy.serve("7")
    assert await attributed(attribution) == spans((5, "7", "7"))
    assert await attributed(attribution) == spans((5, "7", "8"))
    attribution = Attribution(Policy())
    assert await attributed(attribution, version="default") == spans((5, "default", "default"))
    await attribution.policy.serve("7")
    assert await attributed(attribution, version="8") == spans((5, "7", "8"))


async def test_weights_that_change_under_one_name_are_told_by_both_versions() -> None:
    policy = Policy()
    attribution = Attribution(policy)
    await policy.serve("1", "policy")
    before = await attribution.before()
    await policy.serve("2", "policy")
    assert await attribution.spans(before, 5, (), None) == spans((5, "1", "2"))
    await policy.serve("3")
    before = await attribution.before()
    await policy.serve("4", "policy-4")
    assert await attribution.spans(before, 5, (), None) == spans((5, "3", "3")), "version 4 has another name"


async def test_a_version_is_heard_of_when_it_has_sampled_and_not_when_the_rollout_is_over() -> None:
    policy = Policy()
    await attributed(Attribution(policy), version="5")
    assert policy.newest == "5"


async def test_a_model_that_was_renamed_meanwhile_is_asked_for_again() -> None:
    policy = Policy()
    attribution = Attribution(policy)
    first = await attribution.before()
    unknown, odd = Refusal("no such model", 404), Refusal("a text that it does not take", 400)
    assert attribution.refused(first, unknown) is unknown, "the operator named it"
    await policy.serve("1", "policy-1")
    assert isinstance(attribution.refused(first, unknown), Retryable)
    assert isinstance(attribution.refused(first, odd), Retryable), "servers refuse unknown models in many ways"
    second = await attribution.before()
    assert attribution.refused(second, odd) is odd
    assert isinstance(attribution.refused(second, unknown), Retryable), "the trainer may be about to rename it"


class Answers:
    """An HTTP client that answers, or fails, in this order."""

    endpoint = Endpoint("http://127.0.0.1:1/v1", "m")

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def get(self, *given: Any, **named: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_server_that_has_told_its_version_is_asked_for_it_whatever_fails() -> None:
    known, late = {"weight_version": "1"}, CompletionTimeout("no answer")
    client = Answers(late, known, *[late] * 3, *[Refusal("", 404)] * 3, known)
    asked = Question(client, "/weight_info", vllm_version)  # type: ignore[arg-type]
    assert [await asked.now() for _ in range(9)] == [None, "1", *[None] * 6, "1"]


async def test_many_completions_share_a_question_that_was_asked_after_each_of_them() -> None:
    asked: list[asyncio.Future[Any]] = []

    class Held:
        endpoint = Answers.endpoint

        async def get(self, *given: Any, **named: Any) -> Any:
            asked.append(asyncio.get_running_loop().create_future())
            return await asked[-1]

    version = Question(Held(), "/weight_info", vllm_version)  # type: ignore[arg-type]
    first = asyncio.ensure_future(version.now())
    await asyncio.sleep(0.01)
    others = [asyncio.ensure_future(version.now()) for _ in range(100)]
    await asyncio.sleep(0.01)
    assert len(asked) == 1
    asked[0].set_result({"weight_version": "1"})
    assert await first == "1"
    await asyncio.sleep(0.01)
    asked[1].set_result({"weight_version": "2"})
    assert {await other for other in others} == {"2"}
    assert len(asked) == 2


async def test_a_question_that_outlives_its_completions_opens_no_connection() -> None:
    client = HttpClient(Endpoint("http://127.0.0.1:1/v1", "m"))
    await client.aclose()
    assert await Question(client, "/weight_info", vllm_version).now() is None
    with pytest.raises(ConnectionFailed, match="closed"):
        client.session()


@pytest.mark.parametrize(
    ("answer", "questions"),
    [(CompletionTimeout("late"), 3), (Refusal("", 404), 1), ({"weight_version": None}, 1), ([], 1), ({}, 1)],
)
async def test_a_server_that_has_never_told_its_version_is_soon_left_alone(answer: Any, questions: int) -> None:
    client = Answers(*[answer] * 9)
    asked = Question(client, "/weight_info", vllm_version)  # type: ignore[arg-type]
    assert [await asked.now() for _ in range(9)] == [None] * 9
    assert 9 - len(client.answers) == questions


async def test_a_server_that_was_only_busy_when_it_was_asked_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for new weights, at the very start of the run."""
    monkeypatch.setattr("orchestrator.completion.versions.LEFT_ALONE", Backoff(0.0, 0.0))
    client = Answers(
        *[CompletionTimeout("late")] * 3, *[Retryable("HTTP 503", status=503)] * 4, {"weight_version": "1"}
    )
    asked = Question(client, "/weight_info", vllm_version)  # type: ignore[arg-type]
    assert [await asked.now() for _ in range(8)] == [*[None] * 7, "1"]


async def test_a_server_that_does_not_know_the_question_leaves_it_to_the_trainer() -> None:
    policy = Policy()
    attribution = Attribution(policy, Says(*[None] * 9))  # type: ignore[arg-type]
    assert await attributed(attribution) == ()
    await policy.serve("1")
    assert await attributed(attribution) == spans((5, "1", "1"))


async def test_a_model_with_a_name_of_its_own_has_no_other_weights() -> None:
    policy = Policy()
    attribution = Attribution(policy, Says("base"))  # type: ignore[arg-type]
    await policy.serve("1", "lora-1")
    before = await attribution.before()
    assert before.served.model == "lora-1"
    await policy.serve("2", "lora-2")
    assert await attribution.spans(before, 5, (), "base") == spans((5, "1", "1"))


# ---------------------------------------------------------------- in a run's data


def a_member(*versions: tuple[PolicySpan, ...], score: float = 1.0, index: int = 0) -> Member:
    """A rollout of as many turns of two tokens, sampled by these."""
    turns = tuple(
        Turn(
            sequence=number,
            kind=CompletionKind.ACTION,
            kept=0,
            messages=(Message("user", "?"),),
            segment=0,
            prompt_ids=(1,),
            closing="",
            completion=Completion("ab", "ab", "stop", (7, 8), (-1.0, -1.0), 1, 2).sampled_from(version),
            started_s=0.0,
            ended_s=1.0,
        )
        for number, version in enumerate(versions, 1)
    )
    tokens = tuple(token for _ in versions for token in (1, 7, 8))
    line = Trajectory(
        tokens, (False, True, True) * len(versions), (1.0, -1.0, -1.0) * len(versions), (), "sampled", 0
    )
    attempt = Attempt(a_plan(index), Record(started_at=1.0, turns=turns), Ended(EndedName.FINISHED))
    return Member(attempt, line, Score(score, {}))


def test_a_rollouts_spans_are_those_of_its_line() -> None:
    member = a_member(spans((2, "1", "1")), spans((1, "1", "1"), (1, "2", "2")), spans((2, "2", "2")))
    (facts,) = scored_data_group(Group(0, member.attempt.plan.task, (member,), ()))["overrides"]
    assert facts["policy_spans"] == [
        {"tokens": 3, "oldest": "1", "newest": "1"},
        {"tokens": 3, "oldest": "2", "newest": "2"},
    ]
    assert (facts["policy_version"], facts["mixed_policy_versions"], facts["staleness"]) == ("2", True, None)


def test_nothing_is_told_where_nothing_is_known() -> None:
    member = a_member((), ())
    (facts,) = scored_data_group(Group(0, member.attempt.plan.task, (member,), ()))["overrides"]
    assert (facts["policy_spans"], facts["mixed_policy_versions"]) == ([], False)


@pytest.mark.parametrize(("most", "dropped"), [(None, False), (3, False), (2, True), (0, True)])
async def test_groups_with_too_old_a_rollout_are_dropped_if_that_is_asked_for(
    most: int | None, dropped: bool
) -> None:
    orchestrator = Orchestrator(Config(env=EnvSettings(max_staleness=most)))
    await orchestrator.policy.serve("5")
    members = (
        a_member(spans((2, "5", "5"))),
        a_member(spans((1, "2", "2"), (1, "5", "5")), index=1),
        a_member(()),
    )
    group = orchestrator.maker.aged(Group(0, members[0].attempt.plan.task, members, ()))
    assert [member.staleness for member in group.members_G] == [0, 3, None]
    assert group.dropped == (f"1 of 3 rollouts are more than {most} policy versions behind" if dropped else None)


async def test_the_closing_table_says_that_groups_were_dropped_for_their_age() -> None:
    orchestrator, tally = Orchestrator(Config(env=EnvSettings(max_staleness=1))), Tally()
    await orchestrator.policy.serve("5")
    members = a_member(spans((2, "2", "2"))), a_member(spans((2, "5", "5")), score=0.0, index=1)
    tally.group(orchestrator.maker.aged(Group(0, members[0].attempt.plan.task, members, ())))
    assert dropped_text(tally, "orchestrator process") == "1 group: 1 too far behind"


async def test_the_staleness_of_a_rollout_is_that_of_all_that_is_trained_on() -> None:
    member = a_member(spans((2, "5", "5")), spans((2, "2", "2")))
    first, second = member.attempt.record.turns
    record = replace(member.attempt.record, turns=(first, replace(second, segment=1)))
    member = replace(member, attempt=replace(member.attempt, record=record))
    found = {}
    for segments in ("main_line", "all_segments"):
        orchestrator = Orchestrator(Config(env=EnvSettings(trained_segments=segments)))
        await orchestrator.policy.serve("5")
        group = orchestrator.maker.aged(Group(0, member.attempt.plan.task, (member,), ()))
        found[segments] = group.members_G[0].staleness
    assert found == {"main_line": 0, "all_segments": 3}


# ---------------------------------------------------------------- where a trainer says it


@asynccontextmanager
async def listening(policy: Policy) -> AsyncIterator[tuple[str, list[str]]]:
    said: list[str] = []
    port = free_port()
    async with policy_service(f"127.0.0.1:{port}", policy, said.append):
        yield f"http://127.0.0.1:{port}/policy", said


async def test_a_trainer_says_its_version_and_may_ask_for_it() -> None:
    policy = Policy()
    async with listening(policy) as (url, said), aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            assert await answer.json() == {"version": None, "model": None}
        for given in ({"version": 7}, {"version": "7"}, {"version": "8", "model": "policy-8"}):
            async with session.post(url, json=given) as answer:
                assert answer.status == 200, await answer.text()
    assert policy.served == Served("8", "policy-8")
    assert said == ["the policy is version 7 now", "the policy is version 8 now, asked for as policy-8"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"version": "7"}', "text/plain", 415),
        (b"{}", "application/json", 400),
        (b"[7]", "application/json", 400),
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"version": ""}', "application/json", 400),
        (b'{"version": " 7"}', "application/json", 400),
        (b'{"version": null}', "application/json", 400),
        (b'{"version": true}', "application/json", 400),
        (b'{"version": "\\ud800"}', "application/json", 400),
        (b'{"version": "7\\u001b[2J"}', "application/json", 400),
        (b'{"version": 7.5}', "application/json", 400),
        (b'{"version": "7", "modle": "x"}', "application/json", 400),
        (b'{"version": "' + b"7" * 201 + b'"}', "application/json", 400),
        (b'{"version": "' + b"7" * 200_000 + b'"}', "application/json", 413),
    ],
)
async def test_what_is_no_version_is_refused_and_changes_nothing(body: bytes, kind: str, status: int) -> None:
    policy = Policy()
    async with listening(policy) as (url, said), aiohttp.ClientSession() as session:
        async with session.post(url, data=body, headers={"Content-Type": kind}) as answer:
            assert answer.status == status, await answer.text()
    assert (policy.served, said) == (Served(), [])


async def test_the_end_does_not_wait_for_a_trainer_whose_request_waits() -> None:
    policy, waits = Policy(), asyncio.Event()

    async def hangs(served: Served) -> None:
        waits.set()
        await asyncio.Event().wait()

    policy.changed(hangs)
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:  # aiohttp would wait for a minute
        async with listening(policy) as (url, _):
            asked = asyncio.ensure_future(session.post(url, json={"version": "7"}))
            await waits.wait()
        with pytest.raises(aiohttp.ClientError):
            await asked


async def test_an_address_that_is_taken_is_refused_by_name() -> None:
    policy = Policy()
    async with listening(policy) as (url, _):
        taken = url.removeprefix("http://").removesuffix("/policy")
        with pytest.raises(EnvironmentUnusable, match=f"env.policy_address: nothing can listen at {taken}"):
            async with policy_service(taken, policy, print):
                pass
