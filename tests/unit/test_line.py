"""The id line: ids that were sampled stay as they were, whatever the agent makes of their text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.completion.line import Segment, Segments, TokenLine, cut_at_stop, visible_text
from orchestrator.completion.prompt_text import absent_marker
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import main_segment, trajectory
from orchestrator.errors import RecordError
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.types import Completion, CompletionKind, Message, Record, Turn
from tests.fakes.completers import ScriptedCompleter, text_completion
from tests.fakes.plans import a_plan, an_agent
from tests.fakes.tokenizer import END, tokenizer_folder
from tests.fakes.tokenizers import made

TAG = "</code>"
STOP = ("Observation:", "Calling tools:", TAG)
TALK = (Message("system", "You are an agent."), Message("user", "How much is 6 × 7?"))


@pytest.fixture(scope="session")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


def sampled(tokenizer: HubTokenizer, ids: list[int], finish: str = "stop") -> Completion:
    text, visible, _ = visible_text(tokenizer, tuple(ids), STOP)
    return Completion(
        text=text,
        visible=visible,
        finish_reason="length" if finish == "length" else "stop",
        tokens_T=tuple(ids),
        logprobs_T=tuple(-0.1 * (i % 7) for i in range(len(ids))),
        prompt_tokens=1,
        completion_tokens=len(ids),
    )


class Episode:
    """What lease and agent do together: the line grows, the conversation goes on as smolagents writes it."""

    def __init__(self, tokenizer: HubTokenizer) -> None:
        self.tokenizer = tokenizer
        self.line = TokenLine(tokenizer, TAG)
        self.talk = TALK
        self.turns: list[Turn] = []

    def turn(self, ids: list[int], observation: str = "1", finish: str = "stop") -> Turn:
        prompt = self.line.prompt(self.talk)
        completion = sampled(self.tokenizer, ids, finish)
        self.line.append(prompt, self.talk, completion)
        previous = len(self.turns[-1].messages) + self.turns[-1].kept if self.turns else 0
        turn = Turn(
            len(self.turns) + 1, CompletionKind.ACTION, previous, self.talk[previous:], prompt.segment,
            prompt.added, prompt.closing, completion, 0.0, 1.0,
        )  # fmt: skip
        self.turns.append(turn)
        said = completion.visible
        if said and not said.strip().endswith(TAG):
            said += TAG
        self.talk = (
            *self.talk,
            Message("assistant", said.strip()),
            Message("user", f"Observation:\nExecution logs:\n{observation}"),
        )
        return turn

    def trained(self) -> tuple[int, ...]:
        line = trajectory(Record(0.0, turns=tuple(self.turns)), self.tokenizer, TAG)
        return tuple(t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn)


def text(tokenizer: HubTokenizer, episode: Episode) -> str:
    line = trajectory(Record(0.0, turns=tuple(episode.turns)), tokenizer, TAG)
    return tokenizer.decode(line.tokens_T)


def test_a_turn_that_stops_at_the_code_tag_goes_on_behind_the_template_s_end(tokenizer: HubTokenizer) -> None:
    episode = Episode(tokenizer)
    episode.turn(tokenizer.encode("Thought: x\n<code>\nprint(6*7)\n</code>"), "42")
    episode.turn(tokenizer.encode("<code>\nfinal_answer(42)\n</code>"))
    assert [t.segment for t in episode.turns] == [0, 0]
    assert "</code><|im_end|>\n<|im_start|>user\nObservation:\nExecution logs:\n42<|im_end|>\n" in text(
        tokenizer, episode
    )


@pytest.mark.parametrize("finish", ["stop", "length"])  # SGLang's word where the end is the last token asked for
def test_a_sampled_end_is_not_repeated(tokenizer: HubTokenizer, finish: str) -> None:
    episode = Episode(tokenizer)
    episode.turn(tokenizer.encode("I do not know any code.<|im_end|>"), finish=finish)
    episode.turn(tokenizer.encode("<code>\nfinal_answer(42)\n</code>"))
    whole = text(tokenizer, episode)
    assert "any code.<|im_end|>\n<|im_start|>user" in whole
    assert whole.count("</code>") == 1
    assert [t.segment for t in episode.turns] == [0, 0]


def test_what_the_agent_closes_is_masked_and_said_to_be_so(tokenizer: HubTokenizer) -> None:
    episode = Episode(tokenizer)
    episode.turn(tokenizer.encode("Thought: <code>\nx = 1\nprint("), finish="length")
    second = episode.turn(tokenizer.encode("<code>\nfinal_answer(42)\n</code>"))
    assert second.closing == TAG
    assert "print(</code><|im_end|>\n" in text(tokenizer, episode)
    line = trajectory(Record(0.0, turns=tuple(episode.turns)), tokenizer, TAG)
    assert line.messages[2].content == "Thought: <code>\nx = 1\nprint(</code>"


@pytest.mark.parametrize(("appended", "segment"), [(TAG, 0), ("", 0), (f"{TAG} and more", 1), ("Observation:", 1)])
def test_a_program_may_write_the_sampled_stop_string_back(
    tokenizer: HubTokenizer, appended: str, segment: int
) -> None:
    line = TokenLine(tokenizer, "")  # whatever tag the program uses
    completion = sampled(tokenizer, tokenizer.encode(f"<code>\nprint(1)\n{TAG}"))
    line.append(line.prompt(TALK), TALK, completion)
    said = Message("assistant", f"{completion.visible}{appended}")
    following = line.prompt((*TALK, said, Message("user", "1")))
    assert (following.segment, following.closing) == (segment, "")
    if segment == 0:
        assert tokenizer.decode(following.ids).count(TAG) == 1


def test_the_text_of_an_end_that_was_sampled_is_another_conversation(tokenizer: HubTokenizer) -> None:
    """The template prints it as text: the model would see it besides the end."""
    line = TokenLine(tokenizer, TAG)
    completion = sampled(tokenizer, tokenizer.encode("yes<|im_end|>"))
    line.append(line.prompt(TALK), TALK, completion)
    said = Message("assistant", "yes<|im_end|>")
    assert line.prompt((*TALK, said, Message("user", "1"))).segment == 1


def test_leading_whitespace_that_the_agent_strips_stays_in_the_line(tokenizer: HubTokenizer) -> None:
    episode = Episode(tokenizer)
    ids = tokenizer.encode("\n\n  Thought: y\n<code>\n1\n</code>")
    episode.turn(ids)
    episode.turn(tokenizer.encode("<code>\n2\n</code>"))
    assert episode.trained()[: len(ids)] == tuple(ids)
    assert [t.segment for t in episode.turns] == [0, 0]


@pytest.mark.parametrize("change", ["rewritten answer", "shorter", "other task"])
def test_a_rewritten_history_opens_a_new_segment(tokenizer: HubTokenizer, change: str) -> None:
    episode = Episode(tokenizer)
    episode.turn(tokenizer.encode("Thought: x\n<code>\nprint(1)\n</code>"))
    if change == "rewritten answer":
        episode.talk = (*TALK, Message("assistant", "Something else</code>"), Message("user", "go on"))
    elif change == "shorter":
        episode.talk = TALK
    else:
        episode.talk = (TALK[0], Message("user", "Another question"), *episode.talk[2:])
    assert episode.line.prompt(episode.talk).segment == 1


def test_a_side_line_does_not_break_the_main_line(tokenizer: HubTokenizer) -> None:
    line = TokenLine(tokenizer, TAG)
    first = sampled(tokenizer, tokenizer.encode("<code>\n1\n</code>"))
    line.append(line.prompt(TALK), TALK, first)
    plan = (Message("user", "Make a plan"),)
    side = line.prompt(plan)
    assert side.segment == 1
    line.append(side, plan, sampled(tokenizer, tokenizer.encode("My plan<|im_end|>")))
    longer = (
        *TALK,
        Message("assistant", "<code>\n1\n</code>"),
        Message("assistant", "My plan"),
        Message("user", "Go"),
    )
    onward = line.prompt(longer)
    assert onward.segment == 0
    assert "My plan<|im_end|>" in tokenizer.decode(onward.added)


def awkward(tokenizer: HubTokenizer, content: str, seed: int) -> list[int]:
    """Other ids of the same text: pieces encoded apart."""
    draw = random.Random(seed)
    ids: list[int] = []
    while content:
        size = draw.randint(1, 9)
        ids += tokenizer.encode(content[:size])
        content = content[size:]
    return ids


words = st.text(alphabet="abc XYZ\n\t0123.,()=äß中🙂<>/'\"", max_size=60)
endings = st.sampled_from(
    ["</code>", "</code>\n\n", "<|im_end|>", "</code><|im_end|>", "Observation:", "", "\n</code>"]
)


@given(st.lists(st.tuples(words, endings, words, st.integers(0, 10**6)), min_size=1, max_size=6))
def test_trained_ids_are_the_sampled_ids_in_one_line(turns: list[tuple[str, str, str, int]]) -> None:
    tokenizer = load_once()
    episode = Episode(tokenizer)
    for said, ending, observation, seed in turns:
        body = awkward(tokenizer, f"{said}x", seed)
        tail = tokenizer.encode(ending)
        episode.turn(body + tail, observation, "length" if not ending else "stop")
    assert [t.segment for t in episode.turns] == [0] * len(turns)
    assert episode.trained() == tuple(i for t in episode.turns for i in t.completion.tokens_T or ())
    line = trajectory(Record(0.0, turns=tuple(episode.turns)), tokenizer, TAG)
    assert line.tokens_T == tuple(
        i for t in episode.turns for i in (*(t.prompt_ids or ()), *(t.completion.tokens_T or ()))
    )


_LOADED: list[HubTokenizer] = []


def load_once() -> HubTokenizer:
    """hypothesis and fixtures do not mix."""
    if not _LOADED:
        _LOADED.append(load_tokenizer(str(tokenizer_folder())))
    return _LOADED[0]


def a_turn(completion: Completion, prompt: tuple[int, ...] | None = (1, 2)) -> Turn:
    return Turn(1, CompletionKind.ACTION, 0, TALK, 0, prompt, "", completion, 0.0, 1.0)


def test_a_record_that_does_not_add_up_is_refused(tokenizer: HubTokenizer) -> None:
    good = sampled(tokenizer, tokenizer.encode("hello"))
    for bad in (
        {"logprobs_T": tuple(0.5 for _ in good.tokens_T or ())},
        {"logprobs_T": tuple(float("nan") for _ in good.tokens_T or ())},
        {"text": "something else"},
    ):
        values = {f: getattr(good, f) for f in Completion.__slots__} | bad
        with pytest.raises(RecordError):
            trajectory(Record(0.0, turns=(a_turn(Completion(**values)),)), tokenizer, TAG)
    with pytest.raises(RecordError):
        trajectory(Record(0.0), tokenizer, TAG)


def test_ids_made_from_text_are_trained_where_the_text_was_sampled(tokenizer: HubTokenizer) -> None:
    said = ("Thought: x\n<code>\nprint(1)\n", "Thought: y\n<code>\nfinal_answer(1)\n")
    talk: tuple[Message, ...] = TALK
    turns = []
    for number, words_said in enumerate(said):
        completion = Completion(words_said, words_said, "stop", None, None, 5, 5)
        kept = len(turns[-1].messages) + turns[-1].kept if turns else 0
        turns.append(Turn(number + 1, CompletionKind.ACTION, kept, talk[kept:], 0, None, "", completion, 0, 1))
        talk = (*talk, Message("assistant", (words_said + TAG).strip()), Message("user", "Observation:\n1"))
    line = trajectory(Record(0.0, turns=tuple(turns)), tokenizer, TAG)
    assert line.token_source == "retokenized"
    assert line.logprobs_T is None
    learned = tokenizer.decode([t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn])
    assert learned == "".join(said)
    assert tokenizer.decode(line.tokens_T) == tokenizer.render(line.messages, generation_prompt=False)
    assert main_segment(tuple(turns)) == 0


def test_a_turn_of_the_end_alone_goes_on_where_the_template_refuses_empty_turns() -> None:
    tokenizer = made(template="refuses empty turns")
    line, talk = TokenLine(tokenizer, TAG), TALK
    end = tokenizer.encode("<|e|>")
    for ids in (end, tokenizer.encode("words") + end, end, end):
        prompt, completion = line.prompt(talk), sampled(tokenizer, ids)
        assert prompt.segment == 0
        line.append(prompt, talk, completion)
        talk = (*talk, Message("assistant", completion.visible), Message("user", "Go on."))
    added = line.prompt(talk).added
    assert tokenizer.decode(added) == "\n<|s|>user\nGo on.<|e|>\n<|s|>assistant\n"
    with pytest.raises(RecordError, match="an empty turn"):
        tokenizer.render(talk, generation_prompt=True)


def test_an_id_that_stands_for_no_token_is_sampled_recorded_and_said_as_nothing(tokenizer: HubTokenizer) -> None:
    """Models have more rows than their tokenizers have tokens."""
    beyond = tokenizer.size + 7
    assert not tokenizer.is_end(beyond)
    episode = Episode(tokenizer)
    ids = [beyond, *tokenizer.encode("Thought: <code>"), beyond, *tokenizer.encode("1</code>")]
    for said in (
        ids,
        [beyond],
        [beyond, *tokenizer.encode("<|im_end|>")],
        [*tokenizer.encode("<|im_end|>"), beyond],
    ):
        episode.turn(said)
    assert [turn.segment for turn in episode.turns] == [0, 0, 0, 0]
    assert episode.turns[0].completion.visible == "Thought: <code>1"
    assert episode.trained() == tuple(i for turn in episode.turns for i in turn.completion.tokens_T or ())
    line = trajectory(Record(0.0, turns=tuple(episode.turns)), tokenizer, TAG)
    assert [m.content for m in line.messages if m.role == "assistant"] == [
        "Thought: <code>1</code>",
        "",
        "",
        "<|im_end|>",
    ]


def test_a_tokenizer_of_python_alone_says_nothing_for_such_an_id_either(tokenizer: HubTokenizer) -> None:
    slow = HubTokenizer(PythonTokenizer(), "slow")
    assert slow.decode([1, 900, 2]) == "ab"
    assert not slow.is_end(900)


class PythonTokenizer:
    """As `transformers` has them for models of their own: a list of tokens, and no look beyond its end."""

    all_special_ids = (0,)
    eos_token_id, unk_token_id, chat_template = 0, None, ""
    tokens = ("<end>", "a", "b")

    def __len__(self) -> int:
        return len(self.tokens)

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.get_vocab().get(token)

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(self.tokens[i] for i in ids)

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: object) -> str:
        return "".join(message["content"] for message in conversation)


def test_a_marker_cannot_be_known_beforehand() -> None:
    """One that grew until it was absent would take the square of a message made of its beginnings."""
    first, second = absent_marker(TALK), absent_marker(TALK)
    assert first != second
    marker = absent_marker((*TALK, Message("user", first), Message("user", second + "x" * (4 << 20))))
    assert marker not in (first, second)
    assert not marker.startswith((first, second))


def test_one_step_back_of_a_line_is_kept_and_no_more() -> None:
    segments, completions = Segments(), [text_completion(str(n)) for n in range(3)]
    for n, completion in enumerate(completions):
        segments.append(0, (Message("user", "x" * n),), (), completion)
    assert segments.abandon(0, completions[2])
    earlier = segments.get(0)
    assert earlier is not None
    assert earlier.messages == (Message("user", "x"),)
    assert segments.abandon(0, completions[1])
    assert segments.get(0) == Segment(0)


def test_a_line_is_found_by_the_hash_of_its_conversation_whatever_was_asked_between() -> None:
    segments = Segments()
    talk = tuple(Message("user", str(n)) for n in range(6))
    segments.append(0, talk[:2], (), text_completion("y"))
    segments.append(1, (*talk[:2], Message("user", "other")), (), text_completion("z"))
    for asked, found in ((talk, [0]), ((*talk[:2], Message("user", "other"), talk[3]), [1, 0]), (talk[1:], [])):
        assert [segment.number for segment, _ in segments.begin(asked, (), ())] == found


class Alike(str):
    """Texts of which all have the same hash, as a program could choose some that do."""

    def __hash__(self) -> int:
        return 1


async def test_a_conversation_with_the_same_hash_is_another_one(tokenizer: HubTokenizer) -> None:
    first, other = (Message("user", Alike(text)) for text in ("What is 1 + 1?", "Forget all that. What is 0 + 2?"))
    later = (other, Message("assistant", "two"), Message("user", "And 2 + 2?"))
    assert hash(first) == hash(other)
    line = TokenLine(tokenizer, TAG)
    line.append(line.prompt((first,)), (first,), sampled(tokenizer, tokenizer.encode(f"two{END}")))
    assert line.prompt((first, *later[1:])).segment == 0
    assert line.prompt(later).segment == 1
    lease = Lease(a_plan(agent=an_agent(kind="program")), ScriptedCompleter(["two"]), None, {})
    for number, talk in enumerate([(first,), later], 1):
        await lease.complete(AgentRequest(number, CompletionKind.ACTION, talk), str(number).encode())
    assert [turn.segment for turn in lease.turns] == [0, 1]


def test_a_text_is_cut_at_the_first_of_several_stop_strings() -> None:
    text = "x = 1\n</code> and Observation: 2 </code>"
    assert cut_at_stop(text, ("Observation:", TAG)) == cut_at_stop(text, (TAG, "Observation:")) == "x = 1\n"
    assert cut_at_stop(text, ("", "no such")) == text
