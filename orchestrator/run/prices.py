"""What completions and requests to the outside cost, by the counts on record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.errors import ConfigError
from orchestrator.rules.plan import server_of
from orchestrator.run.lenient import mapping, number, objects
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.types import Attempt

_MILLION = 1_000_000
_MOST_BYTES = 1 << 20
_KEYS = ("prompt", "completion")
_HALF = "openai.prompt_price, openai.completion_price: give both, for every server, or none"


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a million prompt tokens and of a million sampled ones, by server, in any currency. `request`:
    of one request of a sandbox that the network answered."""

    servers: tuple[tuple[float, float], ...]
    weights: tuple[float, ...]
    request: float = 0.0

    @classmethod
    def of(cls, servers: Sequence[OpenAISettings], settings: RolloutSettings) -> Prices | None:
        """Of each server its own prices, else those of its model in the table of prices. Where a request alone has
        one, tokens cost nothing. None where no price is given. Raises ConfigError where some are missing."""
        price_table, request = settings.price_table, settings.request_price
        table = {} if price_table is None else _read(price_table)
        prices = [
            table.get(s.model_name, (None, None))
            if s.prompt_price is None and s.completion_price is None
            else (s.prompt_price, s.completion_price)
            for s in servers
        ]
        if not table and all(price is None for pair in prices for price in pair):
            if request is None:
                return None
            prices = [(0.0, 0.0)] * len(prices)
        complete = tuple((p, c) for p, c in prices if p is not None and c is not None)
        if len(complete) < len(prices):
            raise ConfigError(
                f"env.price_table: no prices of {_unpriced(servers, table)} in {price_table}" if table else _HALF
            )
        return cls(complete, tuple(s.weight for s in servers), request or 0.0)

    @classmethod
    def recorded(cls, description: Mapping[str, Any]) -> Prices | None:
        """Those in a run.json, unchecked; None: it has none."""
        found = objects(description.get("prices"))
        rows = [tuple(number(row.get(name)) for name in ("prompt", "completion", "weight")) for row in found]
        servers = [(p, c, w) for p, c, w in rows if p is not None and c is not None and w is not None and w > 0]
        if not servers or len(servers) < len(rows):
            return None
        request = number(found[0].get("request")) or 0.0
        return cls(tuple((p, c) for p, c, _ in servers), tuple(w for _, _, w in servers), request)

    def public(self) -> list[dict[str, float]]:
        """For run.json."""
        more = {"request": self.request} if self.request else {}
        return [
            {"prompt": prompt, "completion": completion, "weight": weight, **more}
            for (prompt, completion), weight in zip(self.servers, self.weights, strict=True)
        ]

    def cost(self, rollout_id: str, prompt_tokens: int, sampled_tokens: int, requests: int = 0) -> float:
        """The cost of so many tokens and requests of one rollout."""
        prompt, sampled = self.servers[server_of(rollout_id, self.weights)]
        return (prompt * prompt_tokens + sampled * sampled_tokens) / _MILLION + self.request * requests

    def cost_of(self, attempt: Attempt) -> float:
        """The cost of all its completions and requests."""
        record = attempt.record
        return self.cost(
            attempt.plan.rollout_id, record.prompt_tokens, record.sampled_tokens, record.crossing_counts["paid"]
        )


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices for runs that have none on record: by model, and of every other one; and of a request."""

    every: tuple[float, float] | None = None
    by_model: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    request: float | None = None

    @classmethod
    def read(
        cls, prompt: float | None, completion: float | None, price_table: Path | None, request: float | None
    ) -> PriceList:
        """Raises ConfigError."""
        if (prompt is None) != (completion is None):
            raise ConfigError(_HALF)
        every = None if prompt is None or completion is None else (prompt, completion)
        return cls(every, {} if price_table is None else _read(price_table), request)

    def of(self, description: Mapping[str, Any]) -> Prices | None:
        """The prices in a run.json, else those of this list; None: nobody gives any. Raises ConfigError for a run
        with a model that a list by model lacks."""
        recorded, every = Prices.recorded(description), self.every
        if recorded is not None:
            return replace(recorded, request=recorded.request or self.request or 0.0)
        if every is None and not self.by_model:
            if self.request is None:
                return None
            every = (0.0, 0.0)
        servers = objects(mapping(description.get("config")).get("openai")) or [{}]
        names = [str(server.get("model_name")) for server in servers]
        pairs = tuple(pair for name in names if (pair := self.by_model.get(name, every)) is not None)
        if len(pairs) < len(names):
            missing = sorted(set(names) - set(self.by_model))
            raise ConfigError(f"env.price_table: no prices of {', '.join(missing)} in it")
        weights = (number(server.get("weight")) or 0.0 for server in servers)
        return Prices(pairs, tuple(weight if weight > 0 else 1.0 for weight in weights), self.request or 0.0)


NO_PRICES = PriceList()


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
