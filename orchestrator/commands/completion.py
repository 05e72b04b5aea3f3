"""`orchestrator completion SHELL`: a script that completes commands, flags and the words that flags take.

source <(orchestrator completion bash)
"""

from collections.abc import Iterator, Mapping
from shlex import quote

from orchestrator import __version__
from orchestrator.settings.flags import Command
from orchestrator.settings.kinds import Choice, File, Files, Flag, Forms
from orchestrator.settings.row import AUTO, Setting

_MADE = f"# Completes orchestrator {__version__}; made by `orchestrator completion`."
_BASH = """\
_orchestrator() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  # Bash takes `--flag=value` for three words.
  if [[ $word == "=" ]]; then word=""; elif [[ $before == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  local place="$COMP_CWORD"
  if [[ $word == -* ]]; then place="flag"; fi
  case "$place:${{COMP_WORDS[1]}}" in
    1:*) words={commands} ;;
{seconds}
    *)
      case "$before" in
{values}
      esac
      if [[ -z $words && $word == -* ]]; then
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{flags}
        esac
      fi ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  # After a prefix like `jsonl:` its path follows.
  if [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *: ]]; then compopt -o nospace; fi
}}
complete -o default -F _orchestrator orchestrator
"""


def run(shell: str) -> int:
    """0: the script is printed."""
    from orchestrator.commands.table import COMMANDS

    script = _fish(COMMANDS) if shell == "fish" else _bash(COMMANDS)
    if shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    print(f"{_MADE}\n{script}", end="")
    return 0


def _bash(commands: tuple[Command, ...]) -> str:
    first = dict.fromkeys(command.name.split()[0] for command in commands)
    seconds = {name: [c.name.split()[1] for c in commands if c.name.startswith(f"{name} ")] for name in first}
    seconds |= {c.name: [*_words(c.arguments[0])] for c in commands if c.arguments and _words(c.arguments[0])}
    seconds["help"] = [*first]
    words = {flag: of for command in commands for flag, row in command.flags().items() if (of := _words(row))}
    return _BASH.format(
        commands=quote(" ".join([*first, "help"])),
        seconds=_cases(4, {f"2:{name}": " ".join(of) for name, of in seconds.items() if of}),
        values=_cases(8, {flag: " ".join(of) for flag, of in sorted(words.items())}),
        flags=_cases(10, {_begins(command): " ".join(command.flags()) for command in commands}),
    )


def _begins(command: Command) -> str:
    """The pattern of a command line's first two words."""
    return quote(command.name) if " " in command.name else f"{quote(command.name + ' ')}*"


def _cases(indent: int, words: Mapping[str, str]) -> str:
    return "\n".join(f"{' ' * indent}{pattern}) words={quote(values)} ;;" for pattern, values in words.items())


def _words(row: Setting) -> tuple[str, ...]:
    words = row.kind.words if isinstance(row.kind, Choice | Forms) else ()
    return (*words, *row.unset_words[:1]) if row.unset == AUTO or (words and row.unset is not None) else words


def _fish(commands: tuple[Command, ...]) -> str:
    return "".join(f"complete -c orchestrator {line}\n" for line in _fish_lines(commands))


def _fish_lines(commands: tuple[Command, ...]) -> Iterator[str]:
    for command in commands:
        first, _, second = command.name.partition(" ")
        summary = quote(command.summary)
        if second:
            yield f"-f -n __fish_use_subcommand -a {first}"
            yield f"-f -n '__fish_seen_subcommand_from {first}' -a {second} -d {summary}"
        else:
            yield f"-f -n __fish_use_subcommand -a {first} -d {summary}"
        context = " ; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        within = f"-n {quote(context)}"
        for argument in command.arguments:
            if words := _words(argument):
                yield f"-f {within} -a {quote(' '.join(words))}"
        for flag, row in command.flags().items():
            yield f"{within} -l {flag.removeprefix('--')} -d {quote(row.text)}{_fish_value(row)}"


def _fish_value(row: Setting) -> str:
    if isinstance(row.kind, Flag):
        return ""
    if words := _words(row):
        return f" -x -a {quote(' '.join(words))}"
    return " -r -F" if isinstance(row.kind, File | Files) else " -x"
