"""What run.json says of a run, and the one line that people get of it."""

import asyncio
from collections.abc import Mapping

from orchestrator import __version__
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.engine.one_group import GroupMaker
from orchestrator.engine.same_ids import digest_of
from orchestrator.errors import ConfigError
from orchestrator.host.base import Hosts
from orchestrator.rules.redact import redact
from orchestrator.rules.text import one_line
from orchestrator.run.directory import RunDirectory
from orchestrator.run.files import RUN_FILE, read_run
from orchestrator.tools.mcp.recorded import tool_facts

_MOST_LAG = 1_000_000


async def describe(run: RunDirectory, maker: GroupMaker, tasks: str, about: Mapping[str, object]) -> None:
    """Writes run.json. `tasks`: where they come from, for display; `about`: what the command adds. Raises
    ConfigError if the agent, or the way token ids are made, is not that of the resumed run."""
    facts = await _facts(maker)
    course = maker.pools or maker.starts
    if maker.starts is not None:
        maker.starts.demand_agent(facts["agent"])
    if (run.path / RUN_FILE).exists():
        earlier = read_run(run.path)
        _demand_same(earlier, facts)
        if course is not None:
            course.resume(_lag(earlier), await asyncio.to_thread(run.results))
        if maker.starts is not None and earlier.get("starts") != maker.starts.digest:
            raise ConfigError("env.start_at: that run's record is not what it was when this run began")
    if course is not None:
        facts["curriculum"] = {"lag": course.lag}
    if maker.starts is not None:
        facts["starts"] = maker.starts.digest
    await run.describe(
        {
            "version": __version__,
            "config": maker.config.public(),
            "seed": maker.shared.seed,
            "tasks": tasks,
            "notes": maker.observer.notes,
            **about,
            **facts,
        }
    )


def _lag(earlier: Mapping[str, object]) -> int:
    """Raises ConfigError."""
    curriculum = earlier.get("curriculum")
    lag = curriculum.get("lag") if isinstance(curriculum, dict) else None
    if type(lag) is not int or not 0 <= lag <= _MOST_LAG:
        raise ConfigError(f"env.resume: {RUN_FILE} does not say the lag of its curriculum; start a new run")
    return lag


def _demand_same(earlier: Mapping[str, object], facts: Mapping[str, object]) -> None:
    if "agent" in earlier and earlier["agent"] != facts["agent"]:
        raise ConfigError(
            "env.resume: the agent's program, prompts or tools are not what the run began with; "
            "bring those back, or start a new run"
        )
    if (before := earlier.get("token_ids")) != facts["token_ids"]:
        raise ConfigError(
            f"env.resume: the run's token ids are {before}, this endpoint's {facts['token_ids']}; "
            "set --openai.base_url to an endpoint of the same kind"
        )


async def _facts(maker: GroupMaker) -> dict[str, object]:
    """Tokenizer, kind of token ids, prices, agent, sandbox."""
    hosts, prices = maker.hosts, maker.shared.costs.prices
    tokenizer, description = hosts.tokenizer, await hosts.describe()
    identity = "its own" if maker.config.env.program is None else "that of model-written code"
    spec = maker.agent_spec()
    calls = (
        {"tool_calls": spec.call_format or ("fenced" if spec.kind == "shell" else "json")}
        if spec.calls_tools
        else {}
    )
    return {
        "tokenizer": tokenizer.name if isinstance(tokenizer, HubTokenizer) else None,
        "tokenizer_digest": await asyncio.to_thread(digest_of, hosts),
        "token_ids": "exact" if hosts.takes_ids else "from text",
        **({"why_text": hosts.why_text} if hosts.why_text else {}),
        **({"prices": prices.public()} if prices is not None else {}),
        **description,
        "agent": {
            "kind": spec.kind,
            "identity": identity,
            **calls,
            **description["agent"],
            **({"mcp_tools": served} if (served := tool_facts(hosts.tools)) else {}),
        },
    }


def no_sampled_ids(hosts: Hosts) -> str:
    """Which token ids take the place of the sampled ones, and why; empty: the ids are the sampled ones."""
    if hosts.takes_ids:
        return ""
    made = "none" if hosts.tokenizer is None else "made from text (retokenized)"
    return f"{made}: {one_line(hosts.why_text)}" if hosts.why_text else made


def summary(maker: GroupMaker) -> str:
    """One line: model, endpoint, group size, and how many sandboxes may live at once."""
    server, other = maker.config.openai[0], no_sampled_ids(maker.hosts)
    source = f"token ids {other}" if other else "exact token ids"
    address = redact(server.base_url) or "the program itself"
    size = maker.config.env.group_size
    return f"{server.model_name} at {address} ({source}); groups of {size}, {maker.hosts.summary()}"
