"""web_search and visit_page through the real Tavily client, against a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.errors import ToolError
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.launch.channels import Channels
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.image.build import ensure_image
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.proxy.lease import Lease
from orchestrator.rules.backoff import Backoff
from orchestrator.rules.outcome import decide
from orchestrator.rules.redact import Secret
from orchestrator.settings.sources import load_config
from orchestrator.tools.base import HostTool
from orchestrator.tools.rules import WebRules
from orchestrator.tools.tavily import MAX_BODY_BYTES, Tavily
from orchestrator.tools.web import MAX_PAGE_CHARS, MAX_RESULT_CHARS, PLAIN_QUERY, web_tools
from orchestrator.types import Attempt, Ended, EndedName, Failed, FailedName, Limits
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.inference import ScriptedServer
from tests.fakes.plans import a_plan, a_record, a_sandbox, some_limits
from tests.fakes.tavily import KEY, FakeTavily, Fault, a_page, a_result, refused

PAGE = "https://example.com/page"


@pytest.fixture
async def service() -> AsyncIterator[FakeTavily]:
    async with FakeTavily() as running:
        yield running


@asynccontextmanager
async def opened(
    service: FakeTavily,
    *,
    key: str = KEY,
    timeout_s: float = 20.0,
    max_calls: int = 4,
    rules: WebRules | None = None,
    fail_rollouts: bool = False,
) -> AsyncIterator[dict[str, HostTool]]:
    client = Tavily(
        Secret(key), base_url=service.url, timeout_s=timeout_s, max_calls=max_calls, backoff=Backoff(0.001, 0.001)
    )
    try:
        yield web_tools(client, rules or WebRules(), fail_rollouts=fail_rollouts)
    finally:
        await client.aclose()


@pytest.fixture
async def tools(service: FakeTavily) -> AsyncIterator[dict[str, HostTool]]:
    async with opened(service) as made:
        yield made


async def search(tools: dict[str, HostTool], **arguments: object) -> list[dict[str, Any]]:
    found = json.loads(await tools["web_search"].call({"query": "anything", **arguments}))
    assert isinstance(found, list)
    return found


async def visit(tools: dict[str, HostTool], url: str = PAGE) -> dict[str, Any]:
    page = json.loads(await tools["visit_page"].call({"url": url}))
    assert list(page) == ["url", "title", "content", "success", "error"]
    return page  # type: ignore[no-any-return]


# ---------------------------------------------------------------- what is asked and given


async def test_a_search_gives_the_predecessors_fields(service: FakeTavily, tools: dict[str, HostTool]) -> None:
    service.found = [
        a_result("https://example.com/1", "Eins", "größer 😀", published_date="2019-05-01"),
        a_result("https://example.com/2"),
    ]
    found = await search(tools, query="who  won\n the cup", num_results=5, filter_year="2019")
    assert found[0] == {
        "title": "Eins",
        "url": "https://example.com/1",
        "content": "größer 😀",
        "snippet": "größer 😀",
        "date": "2019-05-01",
    }
    assert found[1]["date"] is None
    [asked] = service.asked
    assert asked.body["query"] == "who won the cup 2019"
    assert (asked.body["max_results"], asked.body["search_depth"]) == (5, "advanced")
    assert asked.headers["Authorization"] == f"Bearer {KEY}"


async def test_a_visited_page_gives_the_predecessors_fields(
    service: FakeTavily, tools: dict[str, HostTool]
) -> None:
    service.pages[PAGE] = a_page(PAGE, title="A page")
    assert await visit(tools, PAGE + "#part") == {
        "url": PAGE,
        "title": "A page",
        "content": "The page's text.",
        "success": True,
        "error": None,
    }
    [asked] = service.asked
    assert (asked.body["urls"], asked.body["extract_depth"]) == (PAGE, "basic")


async def test_a_service_that_gives_more_than_was_asked_for_is_cut(
    service: FakeTavily, tools: dict[str, HostTool]
) -> None:
    results = [a_result(f"https://example.com/{i}", content="x" * 1_000_000) for i in range(5)]
    service.faults.append(Fault(body=json.dumps({"results": results}).encode()))
    found = await search(tools, num_results=2)
    assert len(found) == 2
    assert len(found[0]["content"]) < MAX_RESULT_CHARS + 100
    assert found[0]["content"].endswith("[cut: 990000 more characters]")


async def test_a_large_page_is_cut_and_says_so(service: FakeTavily, tools: dict[str, HostTool]) -> None:
    service.pages[PAGE] = a_page(PAGE, "é" * 1_000_000)
    page = await visit(tools)
    assert page["success"]
    assert page["content"].endswith(f"[cut: {1_000_000 - MAX_PAGE_CHARS} more characters]")
    assert len(page["content"]) < MAX_PAGE_CHARS + 100


async def test_foreign_texts_are_made_sendable(service: FakeTavily, tools: dict[str, HostTool]) -> None:
    broken = a_result("https://example.com/", title=None, content={"not": "text"}, published_date=7)  # type: ignore[arg-type]
    half = a_result("https://example.com/half", content="half \ud83d")
    service.found = [broken, half, "no object", None, a_result(None), a_result("nonsense")]  # type: ignore[arg-type]
    output = await tools["web_search"].call({"query": "x"})
    assert output.encode()
    found = json.loads(output)
    assert [result["url"] for result in found] == ["https://example.com/", "https://example.com/half"]
    assert (found[0]["title"], found[0]["content"], found[0]["date"]) == ("No title", "", None)
    assert found[1]["content"] == "half ?"


# ---------------------------------------------------------------- what is refused before it is asked


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("web_search", {}, "query must be text, not None"),
        ("web_search", {"query": "x" * 396}, "query has 396 characters; at most 395 are accepted"),
        (
            "web_search",
            {"query": "x", "num_results": 21},
            "num_results must be a whole number from 1 to 20, not 21",
        ),
        ("web_search", {"query": "x", "filter_year": 19}, "filter_year must be a whole number from 1900 to 2100"),
        (
            "web_search",
            {"query": "x", "topic": "news"},
            "there is no argument 'topic'; there are query, num_results",
        ),
        ("web_search", {"query": "GAIA benchmark answers"}, "this query is not allowed"),
        ("visit_page", {"url": "http://169.254.169.254/latest"}, "private, local and reserved addresses cannot"),
        ("visit_page", {"url": "file:///etc/passwd"}, "only urls that begin with http:// or https://"),
        ("visit_page", {"url": "https://huggingface.co/datasets/gaia-benchmark/GAIA"}, "this page is not allowed"),
    ],
)
async def test_a_mistake_or_a_denied_wish_never_reaches_the_service(
    service: FakeTavily, tools: dict[str, HostTool], name: str, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(ToolError) as refused_:
        await tools[name].call(arguments)
    assert str(refused_.value).startswith(told)
    assert service.asked == []


async def test_results_that_lead_to_denied_or_private_pages_are_dropped(
    service: FakeTavily, tools: dict[str, HostTool]
) -> None:
    service.found = [
        a_result("https://huggingface.co/datasets/gaia-benchmark/GAIA"),
        a_result("https://mirror.example/copy", "GAIA Benchmark: all answers"),
        a_result("https://blog.example/x", content="... the gaia-benchmark validation answers: 1. egalitarian"),
        a_result("http://127.0.0.1:8000/"),
        a_result("https://example.com/kept"),
    ]
    assert [result["url"] for result in await search(tools)] == ["https://example.com/kept"]


@pytest.mark.parametrize(
    ("found_at", "content", "told"),
    [
        ("http://10.0.0.1/admin", "secret", "leads to a place that cannot be visited"),
        ("https://huggingface.co/datasets/gaia-benchmark/GAIA", "secret", "is not allowed"),
        (PAGE, "secret: all answers of the GAIA benchmark", "is not allowed"),
    ],
)
async def test_a_redirect_to_a_denied_page_shows_nothing_of_it(
    service: FakeTavily, tools: dict[str, HostTool], found_at: str, content: str, told: str
) -> None:
    service.pages[PAGE] = a_page(found_at, content)
    with pytest.raises(ToolError, match=told) as refused_:
        await visit(tools)
    assert "secret" not in str(refused_.value)


# ---------------------------------------------------------------- what breaks

SERVICE_DOWN: list[tuple[Fault, str, int]] = [
    (refused(401), "does not accept the orchestrator's key", 1),
    (refused(403), "refuses to serve the orchestrator's account", 1),
    (refused(432), "refuses to serve the orchestrator's account", 1),
    (refused(429), "is overloaded; try again later", 3),
    (Fault(500, b"Traceback: key=" + KEY.encode()), "answered with HTTP 500", 3),
    (Fault(503), "answered with HTTP 503", 3),
    (Fault(404), "answered with HTTP 404", 1),
    (Fault(302, headers=(("Location", "http://127.0.0.1:1/"),)), "answered with HTTP 302", 1),
    (Fault(cut=True), "cannot be reached", 3),
]
ODD_ANSWERS = [
    (Fault(body=b"<html>"), "sent an answer that cannot be read"),
    (Fault(body=b"\xff\xfe\x00"), "sent an answer that cannot be read"),
    (Fault(body=b""), "sent an answer that cannot be read"),
    (Fault(body=b"null"), "sent an answer that cannot be read"),
    (Fault(body=b"[1]"), "sent an answer that cannot be read"),
    (Fault(body=b'{"results": {"a": 1}}'), "sent an answer that cannot be read"),
    (Fault(body=b"[" * 100_000), "sent an answer that cannot be read"),
    (Fault(204), "sent an answer that cannot be read"),
    (Fault(body=b" " * (MAX_BODY_BYTES + 1)), "sent more than is read"),
    (Fault(body=gzip.compress(b" " * 99), headers=(("Content-Encoding", "gzip"),)), "sent more than is read"),
]


@pytest.mark.parametrize("name", ["web_search", "visit_page"])
@pytest.mark.parametrize(("fault", "told", "attempts"), SERVICE_DOWN)
async def test_a_service_that_is_down_is_an_error_without_the_key(
    service: FakeTavily,
    caplog: pytest.LogCaptureFixture,
    name: str,
    fault: Fault,
    told: str,
    attempts: int,
) -> None:
    caplog.set_level(logging.DEBUG)
    service.faults.extend([fault] * 10)
    async with opened(service) as tools:
        with pytest.raises(ToolError, match=told) as failed:
            await tools[name].call({"query": "x"} if name == "web_search" else {"url": PAGE})
    assert len(service.asked) == attempts
    assert KEY not in str(failed.value) + caplog.text
    assert failed.value.__cause__ is None


@pytest.mark.parametrize(("fault", "told"), ODD_ANSWERS)
async def test_an_answer_that_is_none_is_an_error_of_a_search_and_a_page_that_cannot_be_read(
    service: FakeTavily, tools: dict[str, HostTool], fault: Fault, told: str
) -> None:
    service.faults.extend([fault] * 2)
    with pytest.raises(ToolError, match=told):
        await search(tools)
    page = await visit(tools)
    assert not page["success"]
    assert told in page["error"]
    assert len(service.asked) == 2


async def test_a_passing_fault_is_not_noticed(service: FakeTavily, tools: dict[str, HostTool]) -> None:
    service.found = [a_result("https://example.com/")]
    service.faults.extend([refused(429), Fault(502)])
    assert len(await search(tools)) == 1
    assert len(service.asked) == 3


async def test_a_request_the_service_refuses_is_the_callers_mistake(service: FakeTavily) -> None:
    service.faults.append(refused(400, "Query is invalid."))
    async with opened(service, fail_rollouts=True) as tools:
        with pytest.raises(ToolError, match="does not accept this request"):
            await search(tools)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (a_page(PAGE, ""), "it has no text"),
        (a_page(PAGE, None), "it has no text"),
        (a_page(PAGE, "\x00\x01\ufffd%PDF" * 100), "it is not text"),
        (None, "nothing could be extracted from it"),
    ],
)
async def test_a_page_without_text_is_a_result_without_success(
    service: FakeTavily, tools: dict[str, HostTool], page: dict[str, Any] | None, told: str
) -> None:
    if page is not None:
        service.pages[PAGE] = page
    result = await visit(tools)
    assert (result["url"], result["success"], result["error"]) == (PAGE, False, told)
    assert "Try another source" in result["content"]


async def test_a_service_that_hangs_is_given_up_and_let_go(service: FakeTavily) -> None:
    service.gate.clear()
    async with opened(service, timeout_s=0.3) as tools:
        with pytest.raises(ToolError, match=r"did not answer within 0\.3 seconds"):
            await search(tools)
        page = await visit(tools)
    assert not page["success"]
    async with asyncio.timeout(120):
        while service.given_up < 2:
            await asyncio.sleep(0.02)
    assert (service.given_up, service.at_once) == (2, 0)


async def test_only_so_many_calls_run_at_once(service: FakeTavily) -> None:
    service.gate.clear()
    async with opened(service, max_calls=3) as tools:
        calls = [asyncio.ensure_future(search(tools)) for _ in range(10)]
        async with asyncio.timeout(120):
            while service.at_once < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        service.gate.set()
        await asyncio.gather(*calls)
    assert service.most_at_once == 3


async def test_a_refused_key_is_said_once_and_loudly(
    service: FakeTavily, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = "tvly-wrong-CANARY"
    async with opened(service, key=wrong) as tools:
        for _ in range(3):
            with pytest.raises(ToolError):
                await search(tools)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "--tavily-api-key" in errors[0]
    assert wrong not in caplog.text


async def test_a_service_that_echoes_the_key_does_not_give_it_away(
    service: FakeTavily, tools: dict[str, HostTool]
) -> None:
    service.found = [a_result(f"https://example.com/?k={KEY}", f"t {KEY}", f"c {KEY}", published_date=KEY)]
    service.pages[PAGE] = a_page(PAGE, f"Authorization: Bearer {KEY}", title=KEY)
    assert KEY not in json.dumps([await search(tools), await visit(tools)])


# ---------------------------------------------------------------- in a lease


async def test_a_failing_service_ends_the_rollout_only_where_that_was_asked_for(service: FakeTavily) -> None:
    for fail_rollouts, live in ((False, True), (True, False)):
        service.faults.extend([refused(403)] * (2 if fail_rollouts else 1))  # the control is refused too
        async with opened(service, fail_rollouts=fail_rollouts) as tools:
            lease = Lease(a_plan(), ScriptedCompleter([""]), None, tools)
            reply = await lease.call_tool(1, b"1", "web_search", {"query": "x"})
        assert lease.live is live
        assert reply.ended == (None if live else "tool_error")
        assert str(lease.tool_calls[0].error).startswith(
            "the web service refuses to serve the orchestrator's account"
        )
    outcome, _ = decide(await lease.ended(), a_record())
    assert isinstance(outcome, Failed)
    assert outcome.name is FailedName.TOOL_ERROR
    assert outcome.reason.startswith("web_search: ")


CHOSEN = "a query that was chosen to fail"


@pytest.mark.parametrize(
    "fault",
    [refused(403), refused(432), Fault(500), Fault(cut=True), Fault(body=b"<html>"), Fault(body=b" " * (9 << 20))],
    ids=["refused", "quota", "500", "cut", "no JSON", "huge"],
)
async def test_a_search_that_was_chosen_to_fail_earns_no_other_attempt(service: FakeTavily, fault: Fault) -> None:
    service.failing[CHOSEN] = fault
    async with opened(service, fail_rollouts=True) as tools:
        for _ in range(3):
            lease = Lease(a_plan(), ScriptedCompleter([""]), None, tools)
            reply = await lease.call_tool(1, b"1", "web_search", {"query": CHOSEN})
            assert reply.ended is None
            assert reply.error
            assert lease.live
    assert sum(asked.body["query"] == PLAIN_QUERY for asked in service.asked) == 1, "one control for all of them"


async def test_a_search_that_was_chosen_to_be_slow_earns_no_other_attempt(service: FakeTavily) -> None:
    service.slow.add(CHOSEN)
    async with opened(service, fail_rollouts=True, timeout_s=5.0) as tools:
        lease = Lease(a_plan(), ScriptedCompleter([""]), None, tools)
        reply = await lease.call_tool(1, b"1", "web_search", {"query": CHOSEN})
    assert reply.ended is None
    assert "did not answer" in str(reply.error)
    assert lease.live


async def test_a_page_that_was_chosen_to_fail_earns_no_other_attempt(service: FakeTavily) -> None:
    service.failing[PAGE] = refused(403)
    async with opened(service, fail_rollouts=True) as tools:
        lease = Lease(a_plan(), ScriptedCompleter([""]), None, tools)
        assert (await lease.call_tool(1, b"1", "visit_page", {"url": PAGE})).ended is None
    assert lease.live


@pytest.mark.parametrize(
    ("name", "arguments", "page"),
    [
        ("visit_page", {"url": PAGE}, Fault(body=b"<html>")),
        ("visit_page", {"url": "http://localhost/"}, None),
        ("web_search", {"query": "gaia benchmark"}, None),
        ("web_search", {"query": ""}, None),
    ],
)
async def test_what_the_code_can_cause_never_earns_another_attempt(
    service: FakeTavily, name: str, arguments: dict[str, Any], page: Fault | None
) -> None:
    if page is not None:
        service.faults.append(page)
    async with opened(service, fail_rollouts=True) as tools:
        lease = Lease(a_plan(), ScriptedCompleter([""]), None, tools)
        assert (await lease.call_tool(1, b"1", name, arguments)).ended is None
    assert lease.live


async def test_a_revoked_lease_lets_go_of_its_search(service: FakeTavily, tools: dict[str, HostTool]) -> None:
    service.gate.clear()
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, tools)
    call = asyncio.ensure_future(lease.call_tool(1, b"1", "web_search", {"query": "x"}))
    async with asyncio.timeout(120):
        while not service.at_once:
            await asyncio.sleep(0.01)
        await lease.aclose()
        while service.at_once:
            await asyncio.sleep(0.01)
    assert service.given_up == 1
    await asyncio.gather(call, return_exceptions=True)


async def test_the_quota_is_used_up_by_calls_that_fail_too(
    service: FakeTavily, tools: dict[str, HostTool]
) -> None:
    lease = Lease(a_plan(limits=some_limits(tool_calls=2)), ScriptedCompleter([""]), None, tools)
    await lease.call_tool(1, b"1", "visit_page", {"url": "http://localhost/"})
    await lease.call_tool(2, b"2", "web_search", {"query": "x"})
    assert (await lease.call_tool(3, b"3", "web_search", {"query": "x"})).ended == "budget"
    assert len(service.asked) == 1
    outcome, _ = decide(await lease.ended(), a_record())
    assert outcome == Ended(EndedName.BUDGET, "2 tool calls")


# ---------------------------------------------------------------- in a run


@pytest.mark.parametrize("key", [KEY, None])
async def test_agents_are_told_of_the_tools_where_there_is_a_key(service: FakeTavily, key: str | None) -> None:
    async with ScriptedServer() as endpoint:
        config = load_config(
            environ={},
            env={"launcher": "process", "tokenizer_name": "none", "tavily_base_url": service.url},
            openai={"base_url": endpoint.base_url, "model_name": "scripted"},
            tavily_api_key=key,
        )
        async with Orchestrator(config) as orchestrator:
            tools = orchestrator.hosts.tools
            assert set(tools) == ({"web_search", "visit_page"} if key else set())
            if key:
                service.found = [a_result("https://example.com/")]
                assert len(await search(dict(tools))) == 1
        assert KEY not in json.dumps(config.public())


def step(code: str) -> str:
    return f"Thought\n<code>\n{code}\n</code>"


async def rolled_out(tools: dict[str, HostTool], codes: list[str], limits: Limits) -> tuple[Attempt, str]:
    """The attempt, and all that the model was shown."""
    completer = ScriptedCompleter([step(code) for code in codes])
    launcher = DockerLauncher("web-tools", max_sandboxes=1)
    try:
        with Channels("web-tools") as channels:
            around = Resources(
                launcher,
                completer,
                None,
                channels.directory,
                tools,
            )
            async with asyncio.timeout(120):
                attempt = await run_rollout(a_plan(sandbox=a_sandbox(DEFAULT_IMAGE), limits=limits), around)
    finally:
        await launcher.aclose()
    return attempt, "\n".join(message.content for message in completer.requests[-1].messages)


class Slow:
    """A page that takes its time."""

    description = "Visit a page."
    inputs: ClassVar[dict[str, Any]] = {"url": {"type": "string", "description": "Where."}}
    output_type = "string"

    async def call(self, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(600)
        return ""


@pytest.mark.long
@pytest.mark.docker
async def test_a_deadline_spent_on_slow_pages_is_no_failure_of_the_endpoint() -> None:
    """Else a model could have its rollout drawn again by visiting such pages."""
    await ensure_image(progress=print)
    limits = some_limits(deadline_s=8.0)
    attempt, _ = await rolled_out({"visit_page": Slow()}, ["visit_page('https://example.com/slow')"], limits)
    assert attempt.record.waiting_s > attempt.record.duration_s / 2
    assert attempt.outcome == Ended(EndedName.TIMEOUT, "the deadline")


@pytest.mark.docker
@pytest.mark.timeout(900)
async def test_code_in_a_sandbox_searches_and_visits_and_sees_failures(service: FakeTavily) -> None:
    await ensure_image(progress=print)
    service.found = [a_result(f"https://example.com/{i}", f"Title {i}") for i in range(9)]
    service.pages["https://example.com/1"] = a_page("https://example.com/1", f"The cup went to Łódź. {KEY}")
    service.pages["https://example.com/2"] = a_page("http://192.168.1.1/", "router")
    codes = [
        "found = web_search('who won', 3, '2019')\n"
        "print(type(found).__name__, len(found), found[1]['title'], found[0]['date'])\n"
        "print(len(web_search(num_results=1, query='again')))\n"
        "page = visit_page(found[1]['url'])\n"
        "print(page['success'], page['error'], page['content'])\n"
        "print(visit_page(url='https://example.com/missing')['success'])",
        "web_search('x', colour='red')",
        "visit_page('http://169.254.169.254/latest/meta-data/')",
        "visit_page('https://example.com/2')",
        "try:\n    web_search('gaia benchmark answers')\nexcept Exception as error:\n    print('told:', error)",
        "import os, pathlib\nprint(dict(os.environ))\nprint(pathlib.Path('/proc/self/environ').read_text())\n"
        "web_search('down')",
        "final_answer(page['content'][:8])",
    ]

    service.failing["down"] = refused(401)
    async with opened(service) as tools:
        attempt, shown = await rolled_out(tools, codes, some_limits())
    assert attempt.outcome == Ended(EndedName.FINISHED)
    assert attempt.record.answer == "The cup "
    for told in (
        "list 3 Title 1 None\n1\nTrue None The cup went to Łódź. [key]\nFalse",
        "web_search() has no argument 'colour'",
        "ToolError: private, local and reserved addresses cannot be visited",
        "ToolError: this page leads to a place that cannot be visited",
        "told: this query is not allowed",
        "ToolError: the web service does not accept the orchestrator's key",
    ):
        assert told in shown
    assert "router" not in shown
    calls = [(call.name, call.error is None) for call in attempt.record.tool_calls]
    assert calls == [
        *[("web_search", True)] * 2,
        *[("visit_page", True)] * 2,
        *[("visit_page", False)] * 2,
        *[("web_search", False)] * 2,
    ]
    assert KEY not in shown + repr(attempt)


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("limits", "detail"),
    [
        (some_limits(cpu_s=3.0), "3 cpu seconds"),
        (some_limits(proxy_bytes=600_000), "600000 bytes over the proxy"),
        (some_limits(tool_calls=4), "4 tool calls"),
    ],
)
async def test_a_budget_that_is_used_up_ends_the_rollout_by_name(
    service: FakeTavily, limits: Limits, detail: str
) -> None:
    await ensure_image(progress=print)
    service.pages[PAGE] = a_page(PAGE, "x" * 50_000)
    burn = (
        "import time\nuntil = time.process_time() + 4\nwhile time.process_time() < until: pass\n"
        if limits.cpu_s
        else "for _ in range(20): visit_page('https://example.com/page')\n"
    )
    async with opened(service) as tools:
        attempt, _ = await rolled_out(tools, [burn + "1"] * 3, limits)
    assert attempt.outcome == Ended(EndedName.BUDGET, detail)
    assert len(attempt.record.turns) == 1
    assert len(service.asked) <= 12
