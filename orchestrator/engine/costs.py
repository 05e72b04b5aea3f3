"""What the attempts of a run cost, counted against `env.max_cost`."""

import math
from collections.abc import Callable, Iterable, Sequence

from orchestrator.errors import ConfigError
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.types import Attempt, Record, RolloutPlan, Split


class Costs:
    """`cost_limit` None: there is no limit, and nothing is counted. `empty` is called once, when no rollout may be
    begun any more. `held`: completions are counted as they are sampled; on a cluster they are not, but when their
    attempt is on record, as requests are everywhere. Raises ConfigError for a limit without prices."""

    def __init__(
        self,
        servers: Sequence[OpenAISettings],
        settings: RolloutSettings,
        empty: Callable[[], None],
        *,
        held: bool,
    ) -> None:
        self.prices = Prices.of(servers, settings)
        self.cost_limit: CostLimit | None = None
        self._held = held
        if settings.max_cost is None:
            return
        if self.prices is None:
            raise ConfigError(
                "env.max_cost: needs prices: set openai.prompt_price and openai.completion_price, or "
                "env.price_table, or env.request_price"
            )
        self.cost_limit = CostLimit(settings.max_cost, self.prices.cost, empty)

    def open(
        self,
        split: Split,
        tally: Tally,
        evaluations: Sequence[Tally] = (),
        under_way: Iterable[tuple[str, Record]] = (),
    ) -> None:
        """Counts what earlier processes of the run have spent: `tally` is theirs, `evaluations` that of each
        evaluation they made, `under_way` what is in no line yet. If nothing is left, no rollout is begun."""
        if self.cost_limit is not None and self.prices is not None:
            price = self.prices.cost  # where completions are not held, those will count with their line
            more = [price(name, r.prompt_tokens, r.sampled_tokens) for name, r in under_way if self._held]
            self.cost_limit.open(
                tally.cost + math.fsum([*(one.cost for one in evaluations), *more]),
                [(split, *place) for place in tally.ungraded]
                + [("eval", *place) for one in evaluations for place in one.ungraded],
            )

    def begun(self, plan: RolloutPlan) -> None:
        """A rollout is begun."""
        if self.cost_limit is not None:
            self.cost_limit.begun(plan.rollout_id, _place(plan))

    def ended(self, attempt: Attempt) -> None:
        """An attempt is on record. Raises CostReached."""
        if self.cost_limit is not None and self.prices is not None:
            plan, cost = attempt.plan, self.prices.cost_of(attempt)
            graded, apart = attempt.ungraded is None, self.prices.request * attempt.record.crossing_counts["paid"]
            self.cost_limit.ended(plan.rollout_id, _place(plan), cost, graded=graded, held=self._held, apart=apart)


def _place(plan: RolloutPlan) -> tuple[Split, int, int]:
    """What all attempts of one rollout share."""
    return plan.split, plan.group, plan.index
