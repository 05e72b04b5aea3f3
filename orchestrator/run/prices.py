"""What completions cost, by the token counts on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import ConfigError
from orchestrator.rules.plan import server_of
from orchestrator.run.lenient import mapping, number, objects
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.types import Attempt

_MILLION = 1_000_000
_MOST_BYTES = 1 << 20
_KEYS = ("prompt", "completion")
_HALF = "openai.prompt_price, openai.completion_price: give both, for every server, or none"


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a million prompt tokens and of a million sampled ones, by server, in any currency."""

    servers: tuple[tuple[float, float], ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, servers: Sequence[OpenAISettings], price_table: Path | None) -> Prices | None:
        """Of each server its own prices, else those of its model in the file `price_table`. None where no price is
        given. Raises ConfigError where some are missing."""
        table = {} if price_table is None else _read(price_table)
        prices = [
            table.get(s.model_name, (None, None))
            if s.prompt_price is None and s.completion_price is None
            else (s.prompt_price, s.completion_price)
            for s in servers
        ]
        if not table and all(price is None for pair in prices for price in pair):
            return None
        complete = tuple((p, c) for p, c in prices if p is not None and c is not None)
        if len(complete) < len(prices):
            raise ConfigError(
                f"env.price_table: no prices of {_unpriced(servers, table)} in {price_table}" if table else _HALF
            )
        return cls(complete, tuple(s.weight for s in servers))

    @classmethod
    def recorded(cls, description: Mapping[str, Any]) -> Prices | None:
        """Those in a run.json, unchecked; None: it has none."""
        rows = [
            (number(row.get("prompt")), number(row.get("completion")), number(row.get("weight")))
            for row in objects(description.get("prices"))
        ]
        servers = [(p, c, w) for p, c, w in rows if p is not None and c is not None and w is not None and w > 0]
        if not servers or len(servers) < len(rows):
            return None
        return cls(tuple((p, c) for p, c, _ in servers), tuple(w for _, _, w in servers))

    def public(self) -> list[dict[str, float]]:
        """For run.json."""
        return [
            {"prompt": prompt, "completion": completion, "weight": weight}
            for (prompt, completion), weight in zip(self.servers, self.weights, strict=True)
        ]

    def cost(self, rollout_id: str, prompt_tokens: int, sampled_tokens: int) -> float:
        """The cost of so many tokens of one rollout."""
        prompt, sampled = self.servers[server_of(rollout_id, self.weights)]
        return (prompt * prompt_tokens + sampled * sampled_tokens) / _MILLION

    def cost_of(self, attempt: Attempt) -> float:
        """The cost of all its completions."""
        return self.cost(attempt.plan.rollout_id, attempt.record.prompt_tokens, attempt.record.sampled_tokens)


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices for runs that have none on record: by model, and of every other one."""

    every: tuple[float, float] | None = None
    by_model: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, prompt: float | None, completion: float | None, price_table: Path | None) -> PriceList:
        """Raises ConfigError."""
        if (prompt is None) != (completion is None):
            raise ConfigError(_HALF)
        every = None if prompt is None or completion is None else (prompt, completion)
        return cls(every, {} if price_table is None else _read(price_table))

    def of(self, description: Mapping[str, Any]) -> Prices | None:
        """The prices in a run.json, else those of this list; None: nobody gives any. Raises ConfigError for a run
        with a model that a list by model lacks."""
        recorded = Prices.recorded(description)
        if recorded is not None or (self.every is None and not self.by_model):
            return recorded
        servers = objects(mapping(description.get("config")).get("openai")) or [{}]
        names = [str(server.get("model_name")) for server in servers]
        pairs = tuple(pair for name in names if (pair := self.by_model.get(name, self.every)) is not None)
        if len(pairs) < len(names):
            missing = sorted(set(names) - set(self.by_model))
            raise ConfigError(f"env.price_table: no prices of {', '.join(missing)} in it")
        weights = (number(server.get("weight")) or 0.0 for server in servers)
        return Prices(pairs, tuple(weight if weight > 0 else 1.0 for weight in weights))


def _unpriced(servers: Sequence[OpenAISettings], table: Mapping[str, Any]) -> str:
    return ", ".join(sorted({s.model_name for s in servers if s.prompt_price is None} - set(table)))


def _read(path: Path) -> dict[str, tuple[float, float]]:
    """Prices by model. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise ConfigError(f"env.price_table: {path} is not a file")
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        parsed = yaml.safe_load(content) if len(content) <= _MOST_BYTES else None
    except OSError as error:
        raise ConfigError(f"env.price_table: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"env.price_table: {path} is not valid YAML: {' '.join(str(error).split())[:200]}"
        ) from error
    form = f"env.price_table: {path} must have lines of the form `MODEL: {{prompt: 2.5, completion: 10}}`"
    if not isinstance(parsed, dict) or not parsed:
        raise ConfigError(form)
    table = {}
    for model, prices in parsed.items():
        if not isinstance(prices, dict) or set(prices) != set(_KEYS) or not all(map(_is_price, prices.values())):
            raise ConfigError(f"{form}; {str(model)[:80]!r} has another form")
        table[str(model)] = (float(prices["prompt"]), float(prices["completion"]))
    return table


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
