"""`hf:NAME?question=COLUMN&answer=COLUMN&split=..&config=..`: a data set of the Hugging Face hub, streamed.

NAME may be a folder of files that the library `datasets` reads, as `hf:./data`. Columns that neither this text nor
`env.columns` names are looked for under the names of `jsonl:` rows. Rows with files are bad tasks: a streamed data
set has no folder with them.
"""

from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.tasks.base import NONE, Columns, Source
from orchestrator.tasks.decoded import Decoded, DecodeError
from orchestrator.tasks.pointers import refuse_pointers
from orchestrator.tasks.query import split_query

_COLUMNS = ("question", "answer", "task_id", "level", "metadata")
DEFAULT_SPLIT = "validation"  # of `env.split`
_SETTINGS = (*_COLUMNS, "split", "config")


def hf_tasks(text: str, *, split: str, columns: Columns = NONE) -> Source:
    """The source. `split`: if the text names none. Raises ConfigError: unknown data set, column or setting."""
    name, settings = split_query(text, "hf")
    if unknown := sorted(set(settings) - set(_SETTINGS)):
        raise ConfigError(f"env.dataset: hf: has no setting {unknown[0]!r}; valid are {', '.join(_SETTINGS)}")
    own_columns = {ours: settings[ours] for ours in _COLUMNS if ours in settings}
    if twice := sorted(set(own_columns) & set(columns)):
        raise ConfigError(f"env.columns: {twice[0]} is named in env.dataset too; name it once")
    columns = {**columns, **own_columns}
    split_name = settings.get("split", split)
    # Hardly anybody asks for the default: a data set with one split means that one.
    only = "any" if "split" not in settings and split == DEFAULT_SPLIT else "this"
    rows = _load(name, settings.get("config"), split_name, only)
    column_names = rows.columns  # None: unknown before reading
    if column_names is not None and (absent := sorted(set(columns.values()) - set(column_names))):
        rows.close()
        raise ConfigError(f"env.dataset: hf:{name} has no column {absent[0]!r}; it has {', '.join(column_names)}")
    source = f"hf:{name}"
    failure = f"env.dataset: {source} ended"
    return Source(f"hf:{text}", lambda: rows.tasks(source, columns, failure), lambda: rows.size)


def _load(name: str, config: str | None, split: str, only: str) -> Decoded:
    refuse_pointers(Path(name), "env.dataset")
    try:
        return Decoded("hub", name, config or "", split, only)
    except DecodeError as error:
        hint = "name another with ?split=, or check the name, your login and the network"
        raise ConfigError(f"env.dataset: cannot load hf:{name} split {split!r}: {error}; {hint}") from error
