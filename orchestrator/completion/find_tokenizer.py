"""Which tokenizer a run has: the one that was asked for, the model's own, or the predecessor's default."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from orchestrator.completion.tokenizer import HubTokenizer, check_source, load_tokenizer
from orchestrator.errors import EnvironmentUnusable
from orchestrator.settings.sampling import SamplingSettings

log = logging.getLogger(__name__)

T = TypeVar("T")
FALLBACK_TOKENIZER = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"  # the predecessor's default


def find_tokenizer(settings: SamplingSettings, model: str) -> HubTokenizer | None:
    """The tokenizer of the settings; else that of the model if it loads, else FALLBACK_TOKENIZER. Blocks. Raises
    EnvironmentUnusable, also for a chat template that cannot show a conversation."""
    name = settings.tokenizer_name
    if name is not None and name.lower() == "none":
        return None
    template_kwargs, call_format = settings.chat_template_kwargs, settings.named_call_format
    load = partial(load_tokenizer, template_kwargs=template_kwargs, call_format=call_format)
    tokenizer = load(name) if name is not None else _first_usable(model, load)
    tokenizer.demand_usable()
    return tokenizer


def check_tokenizer(name: str | None, model: str) -> None:
    """Raises EnvironmentUnusable if the name, or a look into the folder, shows that no tokenizer can be loaded.
    A cheap check, made before sandboxes are."""
    if name is None:
        _first_usable(model, check_source)
    elif name.lower() != "none":
        check_source(name)


def _first_usable(model: str, use: Callable[[str], T]) -> T:
    candidates = (model, FALLBACK_TOKENIZER)
    for candidate in candidates:
        try:
            return use(candidate)
        except EnvironmentUnusable as error:
            log.debug("%s", error)
    raise EnvironmentUnusable(
        f"no tokenizer: neither {' nor '.join(candidates)} is on this machine or can be had from the hub; set "
        "--env.tokenizer_name to the model's folder or hub id, or to none, for `process` and `evaluate` without "
        "token ids"
    )
