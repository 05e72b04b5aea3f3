"""Asks an endpoint, through the chat template, a neutral prompt without a word of the policy's."""

from dataclasses import replace

from orchestrator.completion.base import Completer, CompletionRequest, Tokenizer, UnusableSample, ids_of
from orchestrator.completion.route import RoutedCompleter
from orchestrator.rules.control import Control, ControlAnswer
from orchestrator.types import Message, RolloutPlan

NEUTRAL = (Message("user", "Say hello."),)
MAX_TOKENS = 256  # room for a model that thinks before it speaks


class EndpointControl:
    """The controls of a run's endpoints: one for each server, because a rollout stays with one server."""

    def __init__(self, completer: Completer, tokenizer: Tokenizer | None) -> None:
        self._completer = completer
        self._tokenizer = tokenizer
        self._controls: dict[int, Control] = {}

    @property
    def questions(self) -> int:
        """How many neutral prompts were sent."""
        return sum(control.questions for control in self._controls.values())

    async def answer(self, plan: RolloutPlan, *, age_s: float = 0.0) -> ControlAnswer:
        """The answer of this rollout's server to the neutral prompt. `age_s`: as for `Control.answer`."""
        completer, place = self._completer, 0
        if isinstance(completer, RoutedCompleter):
            completer, place = completer.serving(plan.rollout_id)
        control = self._controls.get(place)
        if control is None:
            control = self._controls[place] = Control(lambda: self._ask(completer, plan))
        return await control.answer(age_s=age_s)

    async def _ask(self, completer: Completer, plan: RolloutPlan) -> str:
        """Asks in the same way as for a completion of the plan: rendered, encoded, sampled."""
        prompt_ids = None
        if completer.takes_ids and self._tokenizer is not None:
            text = self._tokenizer.render(NEUTRAL, generation_prompt=True)
            prompt_ids = ids_of(self._tokenizer.encode(text))
        request = CompletionRequest(
            messages=NEUTRAL,
            prompt_ids=prompt_ids,
            stop=(),
            sampling=replace(plan.sampling, max_tokens=min(MAX_TOKENS, plan.sampling.max_tokens)),
            rollout_id=plan.rollout_id,
            task_id=plan.task.task_id,
            index=plan.index,
            sequence=0,
            split=plan.split,
        )
        try:
            return (await completer.sample(request)).text
        except UnusableSample as error:
            if completer.takes_ids or error.completion.finish_reason != "length":
                raise
            return ""  # it served, and the model thought until the tokens were used up
