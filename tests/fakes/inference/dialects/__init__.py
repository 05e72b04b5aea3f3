"""The dialects by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fakes.inference.dialects.atropos import AtroposDialect
from tests.fakes.inference.dialects.base import Dialect
from tests.fakes.inference.dialects.llamacpp import LlamaCppDialect
from tests.fakes.inference.dialects.openai import OpenAIDialect
from tests.fakes.inference.dialects.sglang import SglangDialect
from tests.fakes.inference.dialects.vllm import VllmDialect

DIALECTS: Mapping[str, Callable[[], Dialect]] = {
    "openai": OpenAIDialect,
    "openai-hosted": lambda: OpenAIDialect(hosted=True),
    "vllm": VllmDialect,
    "sglang": SglangDialect,
    "llamacpp": LlamaCppDialect,
    "atropos": AtroposDialect,
}
