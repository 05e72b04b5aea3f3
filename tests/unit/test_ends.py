"""The ends of turns that no template shows: from a model's files, from the flags of tokens, by a server's word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from orchestrator.completion.base import CompletionRequest, ids_of
from orchestrator.completion.callback import CallbackCompleter
from orchestrator.completion.find_tokenizer import find_tokenizer
from orchestrator.completion.line import TokenLine
from orchestrator.completion.llamacpp import LlamaCppDialect
from orchestrator.completion.sampled import RawSample
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import side_lines, trajectory
from orchestrator.completion.vllm import VllmDialect
from orchestrator.errors import EnvironmentUnusable
from orchestrator.rules.policy import Policy
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Completion, Message, Sampling, Trajectory
from tests.fakes.chat_templates import CHATML, FAMILIES, family
from tests.fakes.plans import a_record, a_turn, an_attempt
from tests.fakes.tokenizers import byte_level

PLAIN = ("<|im_start|>", "<|im_end|>", "<|stop|>", "<|other|>")
TALK = (Message("user", "6*7?"),)


def tokenizer(template: str = CHATML, special: tuple[str, ...] = (), **files: Any) -> PreTrainedTokenizerFast:
    backend = byte_level()
    backend.add_tokens(
        [AddedToken(token, special=token in special, normalized=False) for token in ("<|endoftext|>", *PLAIN)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")  # type: ignore[no-untyped-call]
    made.chat_template = template
    return made


def saved(folder: Path, files: Mapping[str, object], **named: Any) -> HubTokenizer:
    """As a model's folder holds it, with other files beside it."""
    tokenizer(**named).save_pretrained(folder)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return load_tokenizer(str(folder))


def id_of(made: HubTokenizer, token: str) -> int:
    (found,) = made.encode(token)
    return found


@pytest.mark.parametrize("several", [True, False])
def test_ends_are_read_from_the_model_s_generation_config(tmp_path: Path, several: bool) -> None:
    stop = tokenizer().convert_tokens_to_ids("<|stop|>")
    made = saved(tmp_path, {"generation_config.json": {"eos_token_id": [1, stop] if several else stop}})
    assert made.said((*made.encode("42"), stop), "42<|stop|>") == "42"
    assert made.stops(stop)
    assert not made.is_end(id_of(made, "<|other|>"))
    assert made.digest != saved(tmp_path / "other", {}).digest


def test_without_it_the_ends_are_those_of_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    made = saved(tmp_path, {"generation_config.json": {"temperature": 0.7}})
    ends = [token for token in ("<|endoftext|>", *PLAIN) if made.is_end(id_of(made, token))]
    assert ends == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, true]}', "null"])
def test_a_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"generation_config\.json.*mend it or remove it"):
        saved(tmp_path, {"generation_config.json": content})


def test_a_token_that_is_flagged_is_an_end_though_transformers_does_not_list_it(tmp_path: Path) -> None:
    made = saved(tmp_path, {}, special=("<|stop|>",))
    assert id_of(made, "<|stop|>") not in made._tokenizer.all_special_ids
    assert made.said((*made.encode("42"), id_of(made, "<|stop|>")), "42<|stop|>") == "42"


def answers(end: int | str | None, ids: list[int]) -> dict[str, RawSample]:
    """The same answer in each dialect: `end` is what the server says stopped it, None its model's own end."""
    size, logprobs = len(ids), [-0.5] * len(ids)
    vllm = {
        "token_ids": ids,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": "stop",
        "stop_reason": end,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": size}
    matched = ids[-1] if end is None else end
    meta = {"output_token_logprobs": [[-0.5, i, None] for i in ids], "finish_reason": {"type": "stop"}, **usage}
    meta["finish_reason"] = {"type": "stop", "matched": matched}
    last = {"stop": True, "stop_type": "word" if isinstance(end, str) else "eos", "content": ""}
    last |= {"tokens_evaluated": 3, "tokens_predicted": size, "tokens": ids}
    last["completion_probabilities"] = [{"logprob": -0.5}] * size
    return {
        "vllm": VllmDialect().read({"choices": [vllm], "usage": usage}),
        "sglang": SglangDialect().read({"text": "", "meta_info": meta}),
        "llamacpp": LlamaCppDialect().read([last]),
    }


async def completion(made: HubTokenizer, sampled: RawSample) -> Completion:
    async def sampler(request: CompletionRequest) -> RawSample:
        return sampled

    completer = CallbackCompleter(sampler, made, model="m", timeout_s=9.0, policy=Policy())
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=99, seed=1)
    return await completer.sample(
        CompletionRequest(TALK, ids_of((1, 2, 3)), ("</code>",), sampling, "r", "t", 0, 1)
    )


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("by_id", [True, False])
async def test_the_server_s_word_is_learnt_once_and_for_all(dialect: str, by_id: bool) -> None:
    made = HubTokenizer(tokenizer(), "made")
    stop = id_of(made, "<|stop|>")
    assert not made.is_end(stop)
    ids = [*made.encode("42"), stop]
    told = answers(stop if by_id else None, ids)[dialect]
    assert (await completion(made, told)).visible == "42"
    assert made.dated(1.0).is_end(stop)


async def test_an_end_that_only_the_server_named_is_on_record() -> None:
    """A process that reads the record to resume, verify or replay knows the end as the one that sampled."""
    made = HubTokenizer(tokenizer(), "made")
    ids = [*made.encode("42"), id_of(made, "<|stop|>")]
    sampled = await completion(made, answers(ids[-1], ids)["vllm"])
    turn = replace(a_turn(completion=sampled), prompt_ids=(1, 2, 3), messages=TALK)
    record = replace(a_record(0), turns=(turn,))
    line = attempt_line(replace(an_attempt(), record=record))
    (served,) = read_attempt(json.dumps(line, default=list).encode()).record.turns
    assert served.completion == sampled
    later = HubTokenizer(tokenizer(), "made")
    assert not later.is_end(ids[-1])
    read = replace(record, turns=(served,))
    assert trajectory(read, later, "").messages == trajectory(record, made, "").messages
    replayed = TokenLine(HubTokenizer(tokenizer(), "made"), "")
    replayed.append(replayed.prompt(TALK), TALK, served.completion)
    after = replayed.prompt((*TALK, Message("assistant", "42"), Message("user", "7*7?")))
    assert after.segment == 0
    assert made.decode(after.added).startswith("\n<|im_start|>user"), "the turn has ended already"


async def test_an_end_that_files_or_the_template_name_is_not_put_on_record() -> None:
    made = HubTokenizer(tokenizer(), "made")
    ids = [*made.encode("42"), id_of(made, "<|im_end|>")]
    assert not (await completion(made, answers(ids[-1], ids)["vllm"])).server_end


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_text_that_stopped_a_completion_is_no_end(dialect: str) -> None:
    made = HubTokenizer(tokenizer(), "made")
    ids = made.encode("<code>\n1</code>")
    assert (await completion(made, answers("</code>", ids)[dialect])).visible == "<code>\n1"
    assert not made.is_end(ids[-1])
    text = made.encode("42.")
    assert (await completion(made, answers(None, text)[dialect])).visible == "42.", "a piece of text ends no turn"


def test_a_thought_that_ended_ends_no_completion() -> None:
    """gpt-oss goes on behind `<|end|>`: an aborted completion that ends with it is continued."""
    made = family("gpt-oss")
    assert made.is_end(id_of(made, "<|end|>"))
    assert [made.stops(id_of(made, token)) for token in ("<|end|>", "<|message|>", "<|call|>")] == [
        False,
        False,
        True,
    ]


def test_an_end_that_the_model_samples_stands_where_the_template_has_another() -> None:
    made = family("qwen2")
    behind = "<|im_end|>\n<|im_start|>user\n"
    assert made.behind_end(behind, id_of(made, "<|endoftext|>")) == "\n<|im_start|>user\n"
    assert made.behind_end(behind, id_of(made, "<|im_end|>")) == "\n<|im_start|>user\n"
    glm = family("glm4, whose next header is the end")
    assert glm.behind_end("<|user|>\n", id_of(glm, "<|endoftext|>")) == "<|user|>\n", "a header is no end"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (CHATML.replace("m.content", "''"), "it prints nothing of a message of the role system"),
        (CHATML.replace("m.content", "m.text"), "it prints nothing|refuses"),
        (
            CHATML.replace("m.content", "('' if m.role == 'assistant' else m.content)"),
            "it prints nothing of a message of the role assistant",
        ),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one question at a time') }}{% endif %}" + CHATML,
            "one question at a time",
        ),
        (CHATML.replace("in messages", "in messages | reverse"), "it prints messages in another order"),
    ],
)
def test_a_template_that_cannot_show_a_conversation_is_refused_at_the_start(
    tmp_path: Path, template: str, told: str
) -> None:
    saved(tmp_path, {}, template=template)
    config = Config(env=EnvSettings(tokenizer_name=str(tmp_path)))
    with pytest.raises(
        EnvironmentUnusable, match=rf"cannot show a conversation: .*({told}).*--env\.tokenizer_name"
    ):
        find_tokenizer(config.env, config.openai[0].model_name)


def test_the_date_in_a_prompt_is_the_day_of_the_rollout() -> None:
    for name in ("llama3.1, dated", "smollm3, dated", "gpt-oss"):
        made = family(name)
        talk = (Message("system", "You act."), *TALK)
        then, later = (made.dated(at).render(talk, generation_prompt=True) for at in (1.0, 86_399.0))
        assert "1970" in then
        assert then == later != made.render(talk, generation_prompt=True)
        assert "strftime_now" in FAMILIES[name].template


@pytest.mark.parametrize(
    "date",
    [
        "{{ strftime_now('%d %B %Y') }}",
        '{%- if strftime_now is defined -%}{{- strftime_now( "%d %B %Y" ) -}}{%- endif -%}',
        "{% set format = '%d %B %Y' %}{{ strftime_now(format) }}",
        "{% set now = strftime_now %}{{ now('%d') ~ ' ' ~ now('%B') ~ ' ' ~ now('%Y') }}",
        "{% macro day() %}{{ strftime_now('%d %B %Y') }}{% endmacro %}{{ day() }}",
        "{% set s = namespace(d=strftime_now('%d %B %Y')) %}{% for m in messages[:1] %}{{ s.d }}{% endfor %}",
    ],
)
def test_however_a_template_asks_for_the_date(date: str) -> None:
    made = HubTokenizer(tokenizer(date + CHATML), "dated")
    assert made.dated(86_400.0).render(TALK, generation_prompt=True).startswith("02 January 1970<|im_start|>user")


def test_side_lines_that_are_made_from_text_have_the_day_of_the_rollout_too() -> None:
    made = HubTokenizer(tokenizer("{{ strftime_now('%d %B %Y') }}" + CHATML), "dated")
    turns = tuple(replace(a_turn("Yes.", sequence=n + 1), segment=n, messages=TALK) for n in range(2))
    record = replace(a_record(0), turns=turns, started_at=86_400.0)
    ((_, side),) = side_lines(record, made, "", 0)
    for line in (trajectory(record, made, "", 0), side):
        assert isinstance(line, Trajectory)
        assert made.decode(line.tokens_T).startswith("02 January 1970")
