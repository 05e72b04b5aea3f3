"""What is measured from the turns, and what cannot be faked."""

from dataclasses import replace

import pytest

from orchestrator.scorers.manners import calls_final_answer, code_block, tool_call
from orchestrator.scorers.quality import length_penalty, quality
from orchestrator.types import Completion, CompletionKind, Ended, EndedName, Message, Record, Step, Turn

from .episodes import ADVICE, FAILED, FINISHED, PERFECT, PRINTED, code, plan, record, said

TAGS = ("<code>", "</code>")


def measure(episode: Record, ended: Ended = FINISHED, max_steps: int = 11) -> dict[str, float]:
    return quality(plan(max_steps=max_steps), episode, ended, 0.1)


def test_a_perfect_episode_has_everything_but_its_second_step() -> None:
    parts = measure(PERFECT)
    assert parts == pytest.approx(
        {
            "format": 1.0,
            "final_answer": 1.0,
            "execution": 1.0,
            "efficiency": 0.9,
            "length_penalty": 0.0,
            "quality": 0.49,
        }
    )


def test_an_error_after_a_step_counts_against_execution() -> None:
    episode = record((code("1 / 0"), FAILED), (code("final_answer(42)"), ""))
    assert measure(episode)["execution"] == 0.5


def test_an_error_below_printed_output_counts_where_messages_are_joined() -> None:
    joined = "Observation:\nExecution logs:\nfoo\n" + FAILED
    episode = record((code("1 / 0"), joined), (code("final_answer(42)"), ""))
    assert measure(episode)["execution"] == 0.5


def test_a_parsing_error_has_no_call_id_and_counts_too() -> None:
    episode = record(
        (said("I think so."), "Error:\nError in code parsing:\n…" + ADVICE), (code("final_answer(42)"), "")
    )
    assert measure(episode)["execution"] == 0.5


@pytest.mark.parametrize(
    "output",
    ["Error: no such thing", "Error:\nboom", "Traceback (most recent call last):", f"Error:\nboom{ADVICE}"],
)
def test_printing_something_like_an_error_is_no_error(output: str) -> None:
    observation = f"Observation:\nExecution logs:\n{output}\nLast output from code snippet:\nNone"
    episode = record((code("print(text)"), observation), (code("final_answer(42)"), ""))
    assert measure(episode)["execution"] == 1.0


def test_an_error_cannot_be_hidden_by_what_was_printed_before_it() -> None:
    printed = "Observation:\nExecution logs:\nLast output from code snippet:\nNone\n"
    episode = record((code("1 / 0"), printed + FAILED), (code("final_answer(42)"), ""))
    assert measure(episode)["execution"] == 0.5


def test_a_shell_s_commands_ran_well_if_the_last_one_of_a_step_did() -> None:
    seen = ("a\n[exit code 0]", "[exit code 1]\n\n[exit code 0]", "[exit code 0]\n[exit code 1]", "")
    block = "I look.\n```bash\nls\n```"
    episode = record(*((said(text), after) for text, after in zip([block] * 3 + ["Done."], seen, strict=True)))
    shell = replace(plan(), agent=replace(plan().agent, kind="shell"))
    parts = quality(shell, episode, FINISHED, 0.1)
    assert (parts["format"], parts["execution"], parts["final_answer"]) == (1.0, 0.75, 1.0)


def test_an_error_is_seen_across_a_plan_in_between() -> None:
    first, last = record((code("1 / 0"), FAILED), (code("final_answer(42)"), "")).turns
    planning = Turn(
        1, CompletionKind.PLAN, 0, (Message("user", "Make a plan."),), 1, None, "", said("1. Go"), 2.0, 2.5
    )
    whole = (*first.messages, *last.messages)
    episode = Record(0.0, (first, planning, replace(last, kept=0, messages=whole)), answer="42")
    assert measure(episode)["execution"] == 0.5


def test_steps_that_the_sandbox_tells_of_change_nothing() -> None:
    told = Step(1, "<code>x</code>", "x", "fine", "", "", True, 0.1)
    assert measure(replace(PERFECT, steps=(told,) * 5)) == measure(PERFECT)


def test_a_step_whose_end_nobody_saw_did_not_run_well() -> None:
    episode = record((code("print(1)"), PRINTED), (code("while True: pass"), ""), answer=None)
    parts = measure(episode, Ended(EndedName.TIMEOUT))
    assert parts["execution"] == 0.5
    assert parts["efficiency"] == parts["final_answer"] == 0.0


def test_no_action_turn_has_no_quality() -> None:
    assert measure(Record(0.0, answer="42"))["quality"] == 0.0


def test_quality_is_never_below_zero() -> None:
    episode = replace(record((said("hm"), "")), answer="x" * 60_000)
    assert measure(episode)["quality"] == 0.0


def test_efficiency_falls_from_one_step_to_the_last_allowed() -> None:
    steps = [(code("print(1)"), PRINTED)] * 3 + [(code("final_answer(1)"), "")]
    assert measure(record(*steps[-1:]), max_steps=4)["efficiency"] == 1.0
    assert measure(record(*steps), max_steps=4)["efficiency"] == 0.0
    assert measure(record(*steps[-1:]), max_steps=1)["efficiency"] == 1.0


@pytest.mark.parametrize(
    ("length", "weight", "penalty"),
    [(2000, 0.1, 0.0), (3000, 0.1, 0.1), (2500, 0.1, 0.05), (60_000, 0.1, 0.3), (60_000, 0.0, 0.0)],
)
def test_only_long_answers_cost_something(length: int, weight: float, penalty: float) -> None:
    assert length_penalty("x" * length, weight) == pytest.approx(penalty)


WHOLE = "Thought: go\n<code>\nx = 1\n"


@pytest.mark.parametrize(
    ("completion", "good"),
    [
        (said(WHOLE), True),
        (said(WHOLE, WHOLE + "</code>"), True),
        (said(WHOLE, WHOLE + "</code>", ids=True), True),
        (said(WHOLE + "</code>"), True),
        (said(WHOLE, ids=True), False),  # all that was sampled, and no closing tag in it
        (said(WHOLE, WHOLE + "<|im_end|>", ids=True), False),
        (said(WHOLE, WHOLE + "Observation:", ids=True), False),
        (said(WHOLE, reason="length"), False),
        (said("x = 1"), False),
        (said("```python\nx = 1\n```"), False),
        (said("<code></code>"), False),
        (said(WHOLE + "<code>\ny = 2\n"), False),
        (said(WHOLE + "</code>\n<code>\ny = 2\n</code>"), False),
        (said(""), False),
    ],
)
def test_format_is_one_closed_block_in_the_agents_tags(completion, good) -> None:  # type: ignore[no-untyped-def]
    assert (code_block(completion, TAGS) is not None) is good


def test_format_follows_the_agents_own_tags() -> None:
    assert code_block(said("go\n```python\nx = 1\n```"), ("```python", "```")) == "\nx = 1\n"
    assert code_block(said(WHOLE), ("```python", "```")) is None


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("final_answer(42)", True),
        ("if x:\n    final_answer('a')", True),
        ("y = final_answer(answer=3)", True),
        ("final_answer (3)", True),
        ("# final_answer(42)", False),
        ("print('final_answer(42)')", False),
        ("x = 'final_answer'\n(42)", False),
        ("my_final_answer(42)", False),
        ("obj.final_answer(42)", False),
        ("final_answer", False),
        ("", False),
        ("Thoughts: none\nfinal_answer(42)", True),  # no Python as a whole
        ("this is not python\n# final_answer(42)", False),
        ("'\\d'\nfinal_answer(1)", True),
        ("(" * 5000 + "final_answer(1)", True),
        ("-" * 20_000 + "1", False),
        ("x" * 70_000 + "\nfinal_answer(1)", True),
        ("Let's see:\nfinal_answer(1)", True),
        ("So it's\nobj.final_answer(42)", False),
        ("no Python\nx = 'final_answer(1)'", False),
        ('no Python\nx = "\\"final_answer(1)"', False),
        ('no Python\n"""\nfinal_answer(1)\n"""', False),
        ('no Python\n"""\nfinal_answer(1)', False),
        ("no Python\n'''a\\'''final_answer(1)'''", False),
        # Quotes and backslashes in turn: what looked for the end of a string from each of them took minutes.
        ("no Python\n" + "\\'" * 500_000, False),
        ("no Python\n" + '$\\"' * 500_000, False),
        ("no Python\n" + "\\'\\\n" * 200_000, False),
        ("no Python\n" + "'''\\" * 200_000, False),
        ("no Python\n" + "final_answer " * 100_000, False),
    ],
)
def test_final_answer_must_be_called_by_the_code(source: str, called: bool) -> None:
    assert calls_final_answer(source) is called


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("called", "printed"), [(True, None), (True, "Execution logs:\n1"), (False, None)])
def test_errors_are_recognised_as_smolagents_writes_them(joined: bool, called: bool, printed: str | None) -> None:
    from smolagents.memory import ActionStep, ToolCall
    from smolagents.monitoring import AgentLogger, LogLevel, Timing
    from smolagents.utils import AgentExecutionError

    step = ActionStep(
        step_number=1,
        timing=Timing(0.0, 1.0),
        tool_calls=[ToolCall("python_interpreter", "1 / 0", "call_1")] if called else None,
        observations=printed,
        error=AgentExecutionError("division by zero", AgentLogger(LogLevel.OFF)),
    )
    told = [m.content[0]["text"] for m in step.to_messages() if m.role.value == "tool-response"]
    observations = ["\n".join(told)] if joined else told
    first, last = record((code("1 / 0"), ""), (code("final_answer(42)"), "")).turns
    brought = (last.messages[0], *(Message("user", text) for text in observations))
    episode = Record(0.0, (first, replace(last, messages=brought)), answer="42")
    assert measure(episode)["execution"] == 0.5


def measured_as(kind: str, *turns: tuple[Completion, str]) -> dict[str, float]:
    task = plan()
    agent = replace(task.agent, kind=kind, code_tags=("```python", "```"))  # type: ignore[arg-type]
    return quality(replace(task, agent=agent), record(*turns), FINISHED, 0.1)


def test_a_code_agents_own_tags_are_its_form() -> None:
    good = said("```python\nprint(1)\n```", ids=True)
    parts = measured_as("code", (good, PRINTED), (said("```python\nfinal_answer(1)\n```", ids=True), ""))
    assert (parts["format"], parts["final_answer"]) == (1.0, 1.0)
    assert measured_as("code", (code("final_answer(1)"), ""))["format"] == 0.0


def test_a_tool_calling_agents_form_is_one_call() -> None:
    call = said('Action:\n{"name": "read_file", "arguments": {"path": "x"}}')
    last = said('{"name": "final_answer", "arguments": "1"}')
    failed = "Error:\nError executing tool" + ADVICE
    parts = measured_as("tool_calling", (call, "Observation:\ntext"), (said("Hm."), failed), (last, ""))
    assert parts["format"] == pytest.approx(2 / 3)
    assert parts["execution"] == pytest.approx(2 / 3)
    assert parts["final_answer"] == 1.0
    assert measured_as("tool_calling", (code("final_answer(1)"), ""))["final_answer"] == 0.0


@pytest.mark.parametrize(
    "text", ["", "{", "}{", "{}", '{"name": 1, "arguments": {}}', '{"name": "x"}', "{" * 99_999]
)
def test_what_is_no_tool_call(text: str) -> None:
    assert tool_call(text) is None


def test_a_program_is_measured_by_what_can_be_seen_of_it() -> None:
    parts = measured_as("program", (said("anything"), "seen"), (said("cut", reason="length"), ""))
    assert (parts["format"], parts["final_answer"], parts["execution"]) == (0.5, 1.0, 1.0)


def test_a_managed_agents_turns_are_not_the_main_ones() -> None:
    episode = record((code("helper('x')"), PRINTED), (code("final_answer(1)"), ""))
    first, last = episode.turns
    talk = (Message("user", "its own task"),)
    nested = replace(
        first, sequence=2, kept=0, messages=talk, segment=1, agent="helper", completion=said("no form")
    )
    last = replace(last, sequence=3, kept=0, messages=(*first.messages, *last.messages))
    parts = measure(replace(episode, turns=(first, nested, last)))
    assert (parts["format"], parts["execution"], parts["efficiency"]) == (1.0, 1.0, 0.9)
