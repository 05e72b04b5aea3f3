"""Whether recorded ids are those that an endpoint would take: then they stand in the line of a branch."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.host.base import Hosts
from orchestrator.types import Turn


def same_ids(turns: Sequence[Turn], digest: str | None, hosts: Hosts) -> bool:
    """`digest`: of the tokenizer that made them; None: their run does not say it, and the ids alone are looked at.
    Every sampled id must say the text that is on record with it."""
    tokenizer = hosts.tokenizer
    if not hosts.takes_ids or tokenizer is None:
        return False
    if digest is not None and digest_of(hosts) != digest:
        return False
    for turn in turns:
        sampled = turn.completion.tokens_T
        if turn.prompt_ids is None or sampled is None:
            return False
        if tokenizer.decode(sampled) != turn.completion.text:
            return False
    return True


def digest_of(hosts: Hosts) -> str | None:
    """Of the tokenizer; None: there is none, or it is a program's own."""
    return hosts.tokenizer.digest if isinstance(hosts.tokenizer, HubTokenizer) else None
