"""Settings of the tools that run on this machine."""

import re
from dataclasses import dataclass

from orchestrator.settings.json_kinds import Texts
from orchestrator.settings.kinds import URL, Flag, Integer, Text, seconds
from orchestrator.settings.row import RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.tools.rules import DENIED_HOSTS, DENIED_WORDS, HOST_RULE

_HAS_WORD = re.compile(r"[^\W_]")


@dataclass(frozen=True, kw_only=True, repr=False)
class ToolSettings(
    Settings, group="Web tools", resume=Resume.DATA, commands=(*RUNS, "branch"), from_run=("branch",)
):
    """Web tools: the service, what it may not be asked for, and limits, which host tools have too."""

    tool_timeout: float = row(30.0, seconds(at_least=1), "one call of web_search or visit_page, retries included")
    max_concurrent_tool_calls: int = row(
        16,
        Integer(1, 10_000),
        "calls of web tools at a time over all rollouts, as many of host tools, and of each MCP server",
        resume=Resume.FREE,
    )
    web_deny_hosts: tuple[str, ...] = row(
        DENIED_HOSTS,
        Texts(Text("a host, or a host with the beginning of a path", "HOST", HOST_RULE.fullmatch)),
        "denied hosts, subdomains included: never visited, nor shown in results",
    )
    web_deny_words: tuple[str, ...] = row(
        DENIED_WORDS,
        Texts(Text("a word or phrase", "WORDS", _HAS_WORD.search)),
        "denied phrases: queries, results and pages that hold one are refused",
    )
    fail_on_tool_error: bool = row(
        False,
        Flag(),
        "end the rollout as `tool_error` when the web service or an MCP server fails; no: it gets an error",
    )
    tavily_base_url: str = row(
        "https://api.tavily.com",
        URL,
        "Tavily's address, or that of a gateway to it",
        resume=Resume.FREE,
        commands=(*RUNS, "doctor", "branch"),
    )
