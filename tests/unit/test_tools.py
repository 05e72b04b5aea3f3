"""What the web tools refuse before anything is asked for, and the budgets tools and sandboxes have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import pytest

from orchestrator.errors import ConfigError, ToolError
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, ToolReply
from orchestrator.proxy.wire import tool_response
from orchestrator.rules.outcome import decide
from orchestrator.run.lines import dumps
from orchestrator.settings.sources import load_config
from orchestrator.tools.addresses import web_address
from orchestrator.tools.arguments import check_names, text_argument, whole_argument
from orchestrator.tools.rules import WebRules
from orchestrator.types import CompletionKind, Ended, EndedName
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import TALK, a_plan, a_record, some_limits


@pytest.mark.parametrize("value", [None, 7, True, ["x"], {"a": 1}, "", "  \n ", "x" * 101, "half \ud83d"])
def test_text_that_is_none_is_refused_in_plain_words(value: object) -> None:
    with pytest.raises(ToolError) as refused:
        text_argument({"query": value}, "query", 100)
    assert str(refused.value).startswith("query ")
    assert str(refused.value).isascii()


def test_text_is_taken_without_the_spaces_around_it() -> None:
    assert text_argument({"query": "  größe \n"}, "query", 100) == "größe"


@pytest.mark.parametrize(
    ("value", "number"), [(5, 5), (5.0, 5), ("5", 5), (" 5", 5), (None, None), (1, 1), (20, 20)]
)
def test_whole_numbers_come_in_several_spellings(value: object, number: int | None) -> None:
    assert whole_argument({"n": value}, "n", 1, 20) == number


@pytest.mark.parametrize(
    "value",
    [
        0,
        21,
        -1,
        True,
        2.5,
        math.nan,
        math.inf,
        "five",
        "",
        "٥٥٥",
        "1" * 30,
        pytest.param(1 << 17_000, id="huge"),
        1e308,
        [5],
        {},
        "5.5",
    ],
)
def test_what_is_no_whole_number_in_the_range_is_refused(value: object) -> None:
    with pytest.raises(ToolError, match=r"^n must be a whole number from 1 to 20, not ") as refused:
        whole_argument({"n": value}, "n", 1, 20)
    assert len(str(refused.value)) < 120


def test_an_unknown_argument_is_named_with_the_known_ones() -> None:
    with pytest.raises(ToolError, match=r"^there is no argument 'api_key'; there are query, num_results$"):
        check_names({"query": "x", "api_key": "y"}, ("query", "num_results"))
    with pytest.raises(ToolError) as refused:
        check_names({"\ud83d\n": 1}, ("url",))
    assert str(refused.value).isascii()


@pytest.mark.parametrize(
    "value", [10**30, -(2**63) - 1, math.inf, -math.inf, [10**30], {"a": {"b": [2**70]}}, "[" * 500 + "]" * 500]
)
async def test_arguments_that_cannot_be_written_down_are_an_observation(value: object) -> None:
    if isinstance(value, str):
        value = json.loads(value)
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, {})
    reply = await lease.call_tool(1, b"1", "web_search", {"query": value})
    assert str(reply.error).startswith("the arguments ")
    assert lease.live
    [call] = lease.tool_calls
    assert dumps(asdict(call))


async def test_arguments_that_can_be_written_down_are_kept_as_they_came() -> None:
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, {})
    arguments = {"query": "half \ud83d", "a": [1, {"b": 2.5, "c": None}], "n": 2**63 - 1}
    await lease.call_tool(1, b"1", "web_search", arguments)
    assert lease.tool_calls[0].arguments == {**arguments, "query": "half \ufffd"}
    assert dumps(asdict(lease.tool_calls[0]))


@pytest.mark.parametrize("value", [[[]] * 87_000, [{"a": []}] * 9_000, [{str(n): [] for n in range(20_000)}]])
async def test_arguments_of_many_values_are_an_observation(value: object) -> None:
    """A quarter of a megabyte of them would take six in memory, for each call until the group is done."""
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, {})
    reply = await lease.call_tool(1, b"1", "web_search", {"query": value})
    assert reply.error == "the arguments hold more than 10000 values"
    assert lease.tool_calls[0].arguments == {}


class Broken:
    """A tool of the user's own that fails in a way nobody foresaw."""

    description, output_type = "Fails.", "string"
    inputs: ClassVar[dict[str, dict[str, str]]] = {}

    async def call(self, arguments: Mapping[str, object]) -> str:
        raise KeyError("of the service: sk-0123456789")


async def test_a_tool_that_breaks_is_an_observation_and_counts() -> None:
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, {"lookup": Broken()})
    reply = await lease.call_tool(1, b"1", "lookup", {})
    assert reply.error == "the tool failed: KeyError"
    assert lease.live
    assert len(lease.tool_calls) == 1


@pytest.mark.parametrize("kind", ["output", "error"])
def test_what_a_tool_says_can_always_be_sent(kind: str) -> None:
    told = tool_response(ToolReply(**{kind: "no city \ud83d"}))
    assert getattr(told, kind) == "no city \ufffd"


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("https://example.com/a?b=c#part", "https://example.com/a?b=c"),
        ("HTTP://Example.COM", "http://example.com"),
        ("https://example.com:8443/x", "https://example.com:8443/x"),
        ("https://bücher.example/ü", "https://xn--bcher-kva.example/ü"),
        ("http://93.184.216.34/", "http://93.184.216.34/"),
        ("http://[2606:4700::6810:84e5]/", "http://[2606:4700::6810:84e5]/"),
        ("http://localhost.example.com/", "http://localhost.example.com/"),
    ],
)
def test_public_pages_can_be_visited(text: str, sent: str) -> None:
    assert web_address(text) == sent


@pytest.mark.parametrize(
    "text",
    [
        "ftp://example.com/", "file:///etc/passwd", "javascript:alert(1)", "data:text/html,x", "gopher://example.com",
        "example.com", "//example.com/", "http://", "http:///x", "https://.", "http://a..b/", "http://exa%6dple.com/",
        "http://user@example.com/", "http://user:pass@example.com/", "http://example.com\\@127.0.0.1/",
        "http://example.com/a b", "http://example.com/\n", "http://exam\tple.com/", "http://example.com:99999/",
        "http://[::1", "http://[fe80::1%25eth0]/", "http://example.com/" + "x" * 2100,
        "http://" + "a" * 300 + ".com",
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_web_page_is_refused(text: str) -> None:
    with pytest.raises(ToolError) as refused:
        web_address(text)
    assert str(refused.value).isascii()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "0", "0.0.0.0",
        "10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "169.254.170.2", "2852039166",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "127.0.0.1.", "127。0。0。1",
        "１２７.0.0.1", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[fe80::1]",
        "[fc00::1]", "[fd00:ec2::254]", "[ff02::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::1]",
        "[2001:db8::1]", "localhost", "LOCALHOST", "localhost.", "ⓛocalhost", "a.localhost", "printer.local",
        "metadata", "metadata.google.internal", "instance-data.ec2.internal", "localhost.localdomain",
    ],
)  # fmt: skip
def test_private_places_are_refused_in_every_spelling(host: str) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(ToolError):
            web_address(f"{scheme}://{host}:8080/latest/meta-data/")


def test_names_that_only_look_private_are_public() -> None:
    for host in ("example.com", "local.example.org", "internal-affairs.gov", "10.example.net", "8.8.8.8"):
        assert web_address(f"https://{host}/") == f"https://{host}/"


@pytest.mark.parametrize(
    "query",
    [
        "gaia benchmark answers",
        "GAIA-Benchmark level 2",
        "the gaia_benchmark   dataset",
        "ＧＡＩＡ benchmark",
        "ga\u200bia bench\u00admark",
        "gaia validation set metadata.jsonl",
        "site:huggingface.co/datasets/gaia-benchmark",
        "site:datasets-server.huggingface.co rows",
    ],
)
def test_the_benchmarks_own_answers_are_not_searched_for(query: str) -> None:
    assert WebRules().deny_query(query)


@pytest.mark.parametrize(
    "query",
    [
        "Gaia DR3 dataset parallax",
        "benchmark of gaiam yoga mats",
        "gaia hypothesis lovelock",
        "huggingface.co models",
    ],
)
def test_other_questions_may_be_asked(query: str) -> None:
    assert not WebRules().deny_query(query)


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/datasets/gaia-benchmark/GAIA",
        "https://huggingface.co/datasets/gaia%2Dbenchmark/GAIA",
        "https://huggingface.co/datasets/%2567aia-benchmark",
        "https://huggingface.co//datasets/./x/../gaia-benchmark",
        "https://HUGGINGFACE.co:443/spaces/gaia-benchmark/leaderboard",
        "https://hf-mirror.example/datasets/gaia-benchmark/GAIA/raw/main/metadata.jsonl",
        "https://datasets-server.huggingface.co/rows?dataset=x",
        "https://web.archive.org/web/2024/https://huggingface.co/datasets/gaia-benchmark/GAIA",
        "https://translate.example/?u=https%3A%2F%2Fdatasets-server.huggingface.co%2Frows",
        "https://example.com/blog/gaia_benchmark_answers.html",
    ],
)
def test_the_benchmarks_own_pages_are_denied_however_they_are_reached(address: str) -> None:
    assert WebRules().deny_address(address)


def test_a_denied_host_stands_for_its_subdomains_and_a_path_for_what_is_below() -> None:
    rules = WebRules(("example.com", "code.test.org/answers"), ())
    for denied in (
        "https://example.com", "https://www.example.com/x", "https://example.com./", "https://example.com:81/",
        "http://user@example.com/", "https://code.test.org/answers", "https://code.test.org/Answers/1",
        "https://a.code.test.org/answers?x", "https://proxy.net/get?url=http://example.com/",
    ):  # fmt: skip
        assert rules.deny_address(denied), denied
    for allowed in (
        "https://example.com.evil.net/", "https://notexample.com/", "https://example.community/", "https://example.org",
        "https://code.test.org/answers-to-life", "https://code.test.org/", "https://code.test.org/x/answers",
    ):  # fmt: skip
        assert not rules.deny_address(allowed), allowed


def test_without_rules_nothing_is_denied() -> None:
    rules = WebRules((), ())
    assert not rules.deny_query("gaia benchmark")
    assert not rules.deny_address("https://huggingface.co/datasets/gaia-benchmark")


def test_the_lists_can_be_set_and_are_checked() -> None:
    config = load_config(["--env.web_deny_hosts", '["example.com/a"]', "--env.web_deny_words", "[]"], environ={})
    assert config.env.web_deny_hosts == ("example.com/a",)
    assert config.env.web_deny_words == ()
    bad: list[Any] = ['"example.com"', '["http://example.com"]', "[1]", '["no dot"]', "{}", '[""]']
    for value in bad:
        with pytest.raises(ConfigError, match="web_deny_hosts"):
            load_config(["--env.web_deny_hosts", value], environ={})
    with pytest.raises(ConfigError, match="web_deny_words"):
        load_config(["--env.web_deny_words", '["--"]'], environ={})


def test_a_limit_of_cpu_time_needs_somebody_who_counts() -> None:
    assert load_config(["--env.max_cpu_seconds", "30"], environ={}).limits().cpu_s == 30
    with pytest.raises(ConfigError, match="max_cpu_seconds"):
        load_config(["--env.max_cpu_seconds", "30", "--env.launcher", "process"], environ={})


# ---------------------------------------------------------------- budgets of the sandbox


async def test_cpu_time_that_is_used_up_is_seen_before_anything_is_sampled_or_asked_for() -> None:
    used_s = [2.0, 2.1]

    async def cpu_s() -> float | None:
        return used_s[0]

    for ask in ("completion", "tool"):
        completer = ScriptedCompleter(["x"])
        lease = Lease(a_plan(limits=some_limits(cpu_s=2.0)), completer, None, {}, cpu_s)
        await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")
        used_s.reverse()
        if ask == "completion":
            assert (await lease.complete(AgentRequest(2, CompletionKind.ACTION, TALK), b"2")).ended == "budget"
        else:
            assert (await lease.call_tool(1, b"1", "web_search", {})).ended == "budget"
        assert len(completer.requests) == 1
        assert lease.tool_calls == []
        assert decide(await lease.ended(), a_record())[0] == Ended(EndedName.BUDGET, "2 cpu seconds")
        used_s.reverse()


async def test_cpu_time_nobody_can_tell_is_no_reason_to_end() -> None:
    async def unknown() -> float | None:
        return None

    lease = Lease(a_plan(limits=some_limits(cpu_s=2.0)), ScriptedCompleter(["x"]), None, {}, unknown)
    assert (await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")).ended is None


async def test_bytes_are_counted_up_to_the_limit_and_not_past_it() -> None:
    lease = Lease(a_plan(limits=some_limits(proxy_bytes=100)), ScriptedCompleter(["x"]), None, {})
    assert lease.carry(60)
    assert lease.carry(40)
    assert lease.live
    assert not lease.carry(1)
    assert not lease.live
    assert decide(await lease.ended(), a_record())[0] == Ended(EndedName.BUDGET, "100 bytes over the proxy")
