"""Chat templates in the manner of the model families, and what each of their models samples to end a turn.

Only what matters for lines of ids is kept: headers, ends, where a system message goes, what is refused. Tokens are
flagged as in the models' tokenizer.json, and only `eos` and `bos` are named to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from orchestrator.completion.tokenizer import HubTokenizer
from tests.fakes.tokenizers import byte_level


@dataclass(frozen=True)
class Family:
    """`tokens`: special ones. `plain`: added tokens that are not special. `ends`: what the model samples to end a
    turn; `printed`: what the template prints there, if that is not the same. `begins`: what the model samples
    before its answer, and the template prints. `model_ends`: generation_config.json. `folds`, `parts`: how the
    template has to be shown a conversation."""

    template: str
    eos: str
    tokens: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    ends: str = ""
    printed: str = ""
    begins: str = ""
    model_ends: tuple[str, ...] = ()
    bos: str | None = None
    folds: bool = False
    parts: bool = False


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim }}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
GEMMA = (
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last and not add_generation_prompt %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content }}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONY_TOKENS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
    "<|startoftext|>", "<|endoftext|>",
)  # fmt: skip
COHERE_TOKENS = (
    "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>",
)  # fmt: skip
COHERE = (
    "{{ '<BOS_TOKEN>' }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{% if m.role == 'assistant' %}{{ '<|CHATBOT_TOKEN|>' + R + m.content + E }}"
    "{% else %}{{ ('<|SYSTEM_TOKEN|>' if m.role == 'system' else '<|USER_TOKEN|>') + m.content }}{% endif %}"
    "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role | capitalize + ':' }}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ ' ' + part.text }}{% endif %}{% endfor %}{{ '<end_of_utterance>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
        + CHATML, "<|im_end|>", IM, model_ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen3": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>", IM, ("<think>", "</think>"), model_ends=("<|im_end|>", "<|endoftext|>"),
    ),
    "chatml of a base model": Family(CHATML, "<|endoftext|>", IM, ends="<|im_end|>"),
    "chatml of plain tokens": Family(
        CHATML, "<|endoftext|>", ("<|endoftext|>",), ("<|im_start|>", "<|im_end|>"), ends="<|im_end|>"
    ),
    "yi, with `</s>` as its end": Family(CHATML, "</s>", ("</s>", *IM), ends="<|im_end|>"),
    "internlm": Family(
        "{{ '<s>' }}" + CHATML, "</s>", ("<s>", "</s>", *IM), ends="<|im_end|>", model_ends=("</s>", "<|im_end|>")
    ),
    "hermes": Family("{{ '<|begin_of_text|>' }}" + CHATML, "<|im_end|>", ("<|begin_of_text|>", *IM)),
    "always a generation prompt": Family(CHATML.replace("add_generation_prompt", "true"), "<|im_end|>", IM),
    "llama2": Family(
        SYSTEM_FIRST + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<s>[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}",
        "</s>", ("<s>", "</s>"), ends=" </s>", begins=" ",
    ),
    "llama3": Family(LLAMA3, "<|eot_id|>", (*LLAMA3_TOKENS, "<|end_of_text|>")),
    "llama3 with the base model's end": Family(
        LLAMA3, "<|end_of_text|>", (*LLAMA3_TOKENS, "<|end_of_text|>"), ends="<|eot_id|>",
        model_ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "llama3.1, dated": Family(
        "{% if not date_string is defined %}{% set date_string = strftime_now(\"%d %b %Y\") %}{% endif %}"
        "{{ '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' }}"
        "{{ messages[0].content + '<|eot_id|>' }}{% set messages = messages[1:] %}"
        + LLAMA3.replace("{{ '<|begin_of_text|>' }}", ""),
        "<|eot_id|>", LLAMA3_TOKENS,
    ),
    "llama4": Family(
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|header_start|>' + m.role + '<|header_end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}",
        "<|eot|>", ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    ),
    "gemma2": Family(
        "{{ '<bos>' }}" + NO_SYSTEM + ALTERNATE + GEMMA, "<eos>",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ends="<end_of_turn>", folds=True,
    ),
    "gemma3": Family(
        "{{ '<bos>' }}" + SYSTEM_FIRST + ALTERNATE
        + GEMMA.replace("{{ m.content | trim", "{{ (system if loop.first else '') + m.content | trim"),
        "<eos>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ends="<end_of_turn>",
        model_ends=("<eos>", "<end_of_turn>"),
    ),
    "gemma of plain tokens": Family(
        "{{ '<bos>' }}" + GEMMA, "<eos>", ("<bos>", "<eos>"), ("<start_of_turn>", "<end_of_turn>"),
        ends="<end_of_turn>",
    ),
    "mistral v1": Family(
        "{{ '<s>' }}" + ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ ' [INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
        "</s>", ("<s>", "</s>"), begins=" ", folds=True,
    ),
    "mistral v3": Family(
        "{{ '<s>' }}" + SYSTEM_FIRST + ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system if loop.first else '') + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}",
        "</s>", ("<s>", "</s>", "[INST]", "[/INST]"), begins=" ",
    ),
    "mistral nemo, the system message before the last question": Family(
        "{{ '<s>' }}" + SYSTEM_FIRST + ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST]' + (system if loop.last else '') + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        "</s>", ("<s>", "</s>", "[INST]", "[/INST]"), folds=True,
    ),
    "mistral small": Family(
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'system' %}"
        "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% elif m.role == 'user' %}"
        "{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
        "</s>", ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "phi3": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
        "<|endoftext|>", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ends="<|end|>",
        model_ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "phi4": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        "<|endoftext|>", ("<|im_sep|>", *IM), ends="<|im_end|>", model_ends=("<|endoftext|>", "<|im_end|>"),
    ),
    "deepseek v2": Family(
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ 'User: ' + m.content + '\n\n' }}{% elif m.role == 'system' %}{{ m.content + '\n\n' }}"
        "{% else %}{{ 'Assistant: ' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}",
        "<｜end▁of▁sentence｜>", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ),
    "deepseek r1": Family(
        "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<｜User｜>' + m.content }}{% elif m.role == 'system' %}{{ m.content }}{% else %}"
        "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        "<｜end▁of▁sentence｜>", ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "gpt-oss": Family(
        HARMONY, "<|return|>", HARMONY_TOKENS, ends="<|return|>", printed="<|end|>",
        begins="<|channel|>final<|message|>", model_ends=("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "gpt-oss without its configuration": Family(
        HARMONY, "<|return|>", ("<|endoftext|>",), HARMONY_TOKENS[:-1], ends="<|return|>", printed="<|end|>",
        begins="<|channel|>final<|message|>",
    ),
    "glm4, whose next header is the end": Family(
        "{{ '[gMASK]<sop>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "<|endoftext|>", ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
        ends="<|user|>", model_ends=("<|endoftext|>", "<|user|>"),
    ),
    "kimi": Family(
        "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
        "[EOS]",
        ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_system|>"),
        ends="<|im_end|>",
    ),
    "command r": Family(
        COHERE.replace("R + m.content + E", "m.content"), "<|END_OF_TURN_TOKEN|>", COHERE_TOKENS
    ),
    "command a": Family(
        COHERE.replace("R +", "'<|START_RESPONSE|>' +").replace("+ E", "+ '<|END_RESPONSE|>'"),
        "<|END_OF_TURN_TOKEN|>", COHERE_TOKENS, begins="<|START_RESPONSE|>",
        ends="<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ),
    "granite": Family(
        "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}"
        "{{ '<|end_of_text|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        "<|end_of_text|>", ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    ),
    "nemotron nano v2": Family(
        "{% for m in messages %}{% if m.role == 'system' %}{{ '<SPECIAL_10>System\n' + m.content | trim + '\n' }}"
        "{% elif m.role == 'user' %}{{ '<SPECIAL_11>User\n' + m.content | trim + '\n' }}"
        "{% else %}{{ '<SPECIAL_11>Assistant\n' + m.content | trim + '\n<SPECIAL_12>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<SPECIAL_11>Assistant\n' }}{% endif %}",
        "<SPECIAL_12>", ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"), ends="\n<SPECIAL_12>",
    ),
    "falcon3": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' + m.content + '<|endoftext|>' + ('' if loop.last else '\n') }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        "<|endoftext|>", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "olmo2": Family(
        "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n' + m.content + '<|endoftext|>' + ('' if loop.last else '\n') }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        "<|endoftext|>", ("<|endoftext|>",),
    ),
    "smollm3, dated": Family(
        "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %B %Y') + '\n\n' }}"
        "{{ messages[0].content + '<|im_end|>\n' }}{% set messages = messages[1:] %}" + CHATML,
        "<|im_end|>", IM,
    ),
    "minicpm, no end printed": Family(
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '<用户>' + m.content | trim + '<AI>' }}"
        "{% else %}{{ m.content | trim }}{% endif %}{% endfor %}",
        "</s>", ("<s>", "</s>"), ends="</s>", printed="",
    ),
    "jamba": Family(
        "{{ '<|startoftext|>' }}{% for m in messages %}{{ '<|bom|><|' + m.role + '|> ' + m.content + '<|eom|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|bom|><|assistant|> ' }}{% endif %}",
        "<|endoftext|>", ("<|startoftext|>", "<|endoftext|>", "<|bom|>", "<|eom|>", "<|assistant|>"),
        ends="<|eom|>", model_ends=("<|endoftext|>", "<|eom|>"),
    ),
    "exaone": Family(
        "{% for m in messages %}{{ '[|' + m.role + '|]' + m.content }}"
        "{{ '\n' if m.role == 'user' else '[|endofturn|]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}",
        "[|endofturn|]", ("[|endofturn|]", "[|system|]", "[|user|]", "[|assistant|]"),
    ),
    "hunyuan": Family(
        "{% for m in messages %}{% if m.role == 'system' %}{{ '<|startoftext|>' + m.content + '<|extra_4|>' }}"
        "{% elif m.role == 'user' %}{{ m.content + '<|extra_0|>' }}"
        "{% else %}{{ m.content + '<|eos|>' }}{% endif %}{% endfor %}",
        "<|eos|>", ("<|startoftext|>", "<|extra_4|>", "<|extra_0|>", "<|eos|>"),
    ),
    "seed-oss": Family(
        "{% for m in messages %}{{ '<seed:bos>' + m.role + '\n' + m.content + '<seed:eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<seed:bos>assistant\n' }}{% endif %}",
        "<seed:eos>", ("<seed:bos>", "<seed:eos>"), ("<seed:think>", "</seed:think>"),
    ),
    "ernie": Family(
        "{{ '<|begin_of_sentence|>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n' }}"
        "{% elif m.role == 'user' %}{{ 'User: ' + m.content + '\n' }}"
        "{% else %}{{ 'Assistant: ' + m.content + '<|end_of_sentence|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}",
        "</s>", ("</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>"), ends="<|end_of_sentence|>",
        model_ends=("</s>", "<|end_of_sentence|>"),
    ),
    "zephyr": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        "</s>", ("<s>", "</s>"),
    ),
    "vicuna": Family(
        SYSTEM_FIRST + "{{ system }}{% for m in messages %}"
        "{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}",
        "</s>", ("<s>", "</s>"),
    ),
    "openchat": Family(
        "{{ '<s>' }}{% for m in messages %}{{ 'GPT4 Correct ' + m.role | title + ': ' + m.content }}"
        "{{ '<|end_of_turn|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant: ' }}{% endif %}",
        "</s>", ("<s>", "</s>", "<|end_of_turn|>"), ends="<|end_of_turn|>",
    ),
    "idefics3, parts alone": Family(PARTS, "<end_of_utterance>", ("<end_of_utterance>",), parts=True),
    "parts, without a system message": Family(
        NO_SYSTEM + PARTS, "<end_of_utterance>", ("<end_of_utterance>",), parts=True, folds=True
    ),
    "leaves the system message out": Family(
        CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
        "<|im_end|>", IM, folds=True,
    ),
    "reka": Family(
        "{% for m in messages %}{{ ('assistant' if m.role == 'assistant' else 'human') + ': ' + m.content }}"
        "{{ ' <sep> ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        "<|endoftext|>", ("<|endoftext|>",), ("<sep>",), ends=" <sep>",
    ),
    "no end behind the last turn": Family(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '' if loop.last and not add_generation_prompt else '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|endoftext|>", IM, ends="<|im_end|>",
    ),
    "a second end behind the first": Family(
        CHATML.replace("<|im_end|>\n", "<|im_end|><|endoftext|>\n"), "<|im_end|>", IM, ends="<|im_end|>",
    ),
}  # fmt: skip


def family(name: str) -> HubTokenizer:
    """A small tokenizer of byte-level pieces with the family's tokens and template."""
    told = FAMILIES[name]
    backend = byte_level()
    tokens = [AddedToken(token, special=True, normalized=False) for token in told.tokens]
    backend.add_tokens([*tokens, *(AddedToken(token, special=False, normalized=False) for token in told.plain)])
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=told.eos)  # type: ignore[no-untyped-call]
    inner.chat_template = told.template
    ends = frozenset(backend.token_to_id(token) for token in told.model_ends)
    return HubTokenizer(inner, name, model_ends=ends or None)
