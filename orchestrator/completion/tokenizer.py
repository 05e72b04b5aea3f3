"""The model's tokenizer and chat template, from a folder or the hub.

Whether a name can be loaded at all is checked before transformers is imported: without network its
hub client would retry for most of a minute.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from orchestrator.calls.formats import forced, format_of
from orchestrator.completion.base import Span, ids_of
from orchestrator.completion.control_tokens import ControlTokens
from orchestrator.completion.ends import Ends, ends_in
from orchestrator.completion.shape import Shape
from orchestrator.completion.template import ChatTemplate
from orchestrator.errors import ConfigError, EnvironmentUnusable, RecordError
from orchestrator.rules.text import path_of
from orchestrator.types import CallFormat, Message, Tools

HUB_TIMEOUT_S = 1.5
_FLAG = "--env.tokenizer_name"
_GENERATION = "generation_config.json"
# Ids of long pieces are kept: all rollouts of a run begin with one system message, those of a group with one task
# besides, and encoding takes milliseconds.
_PIECES = 64
_PIECE_CHARS = range(2_000, 100_000)


class HubTokenizer:
    """A `transformers` tokenizer behind the `Tokenizer` protocol."""

    def __init__(
        self,
        tokenizer: Any,
        name: str,
        template_kwargs: Mapping[str, Any] | None = None,
        call_format: CallFormat | None = None,
        model_ends: frozenset[int] | None = None,
    ) -> None:
        """`call_format`: how the model writes calls; None: as its template shows. `model_ends`: what the model's
        generation_config.json names as ends; None: it is not known."""
        self._tokenizer = tokenizer
        self.name = name
        self.call_format = call_format or format_of(str(getattr(tokenizer, "chat_template", "")))
        self._template_kwargs = dict(template_kwargs or {})
        self._template = ChatTemplate(tokenizer, self._template_kwargs, self.call_format)
        self._at: float | None = None
        # Parameters of the library itself, which are not for the template; another template would be one.
        reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
        if others := sorted(reserved & self._template_kwargs.keys()):
            raise ConfigError(f"env.chat_template_kwargs: {', '.join(others)} cannot be told to a chat template")
        self.size = len(tokenizer)
        added, special = getattr(tokenizer, "added_tokens_decoder", {}), tokenizer.all_special_ids
        eos = {tokenizer.eos_token_id} - {None}
        self._ends = Ends(
            added,
            special,
            eos | (model_ends or set()),
            self._template,
            self.call_format,
            complete=model_ends is not None,
        )
        # Used directly: through `transformers`, texts and ids are converted a few more times.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokens_in_text: re.Pattern[str] | None = None
        self._borders: frozenset[str] = frozenset()
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._find_borders(self._backend.get_added_tokens_decoder().values())

        # Decodes directly, unless the model has a decoder of its own: `transformers` would only look at each id.
        home = str(getattr(getattr(type(tokenizer), "_decode", None), "__module__", ""))
        self._decoder = self._backend if home.startswith("transformers.tokenization_utils") else None
        self._kept = functools.lru_cache(_PIECES)(lambda piece: ids_of(self._encode([piece])[0]))
        self._controls = ControlTokens(
            added, special, self._template.text, getattr(self._backend, "normalizer", None)
        )
        # The unknown token may come out of any text.
        self._never_plain = self._controls.ids - {tokenizer.unk_token_id}

    @property
    def unknown_template_kwargs(self) -> list[str]:
        """Names in `template_kwargs` that the chat template does not contain."""
        return [
            name for name in self._template_kwargs if not re.search(rf"\b{re.escape(name)}\b", self._template.text)
        ]

    @property
    def digest(self) -> str:
        """The same for tokenizers that give the same ids and render the same prompts. Takes tens of
        milliseconds."""
        content = (
            repr(sorted(self._tokenizer.get_vocab().items())) if self._backend is None else self._backend.to_str()
        )
        kwargs, ends = sorted(self._template_kwargs.items()), sorted(self._ends.declared)
        identity = f"{content}\0{self._template.text}\0{kwargs}\0{ends}"
        return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()

    def encode(self, text: str, plain: Sequence[Span] = ()) -> list[int]:
        """Raises RecordError for a text that cannot be encoded."""
        ids: list[int] = []
        at = 0
        for start, end in plain:
            ids += [*self._recognised(text[at:start]), *self._spelled_out(text[start:end])]
            at = end
        return ids + self._recognised(text[at:])

    def spells_control(self, text: str) -> bool:
        return self._controls.spelled_in(text)

    def may_hold_control(self, text: str) -> bool:
        return self._controls.may_hold(text)

    def controls(self, text: str) -> list[int]:
        return self._controls.found_in(text)

    def _recognised(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces(text):
            ids += self._kept(piece) if len(piece) in _PIECE_CHARS else self._encode([piece])[0]
        return ids

    def _spelled_out(self, text: str) -> list[int]:
        """Ids of a text without any control token: a text that spells one is encoded in two halves."""
        ids: list[int] = []
        pieces = self._controls.cut(text)
        for piece, piece_ids in zip(pieces, self._encode(pieces), strict=True):
            if self._never_plain.isdisjoint(piece_ids):
                ids += piece_ids
            elif len(piece) > 1:  # it still gives a control token: one within another, or found in another way
                middle = len(piece) // 2
                ids += [*self._spelled_out(piece[:middle]), *self._spelled_out(piece[middle:])]
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        try:
            if self._backend is not None:
                # As a batch, so that the library lets other threads run meanwhile.
                batch = self._backend.encode_batch_fast(texts, add_special_tokens=False)
                return [list(encoding.ids) for encoding in batch]
            return [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        except Exception as error:  # a lone surrogate raises TypeError, other texts other errors
            raise RecordError(f"the tokenizer refuses a text: {error}") from error

    def _find_borders(self, tokens: Iterable[Any]) -> None:
        """Finds the added tokens at which a text can be cut without changing its ids.

        They are looked for first, and the text before and behind one is encoded apart. Not so with tokens that
        take in the space before them, must stand alone, or are looked for in normalized text.
        """
        added = [t for t in tokens if not t.normalized and t.content]
        self._borders = frozenset(t.content for t in added if not (t.lstrip or t.single_word))
        if self._borders:
            longest_first = sorted((t.content for t in added), key=len, reverse=True)
            self._tokens_in_text = re.compile("|".join(map(re.escape, longest_first)))

    def _pieces(self, text: str) -> Iterator[str]:
        """`text` in pieces that can be encoded apart, each but the last long enough to be kept."""
        start = 0
        if self._tokens_in_text is not None and len(text) >= _PIECE_CHARS.start:
            for token in self._tokens_in_text.finditer(text):
                if token.start() - start >= _PIECE_CHARS.start and token.group() in self._borders:
                    yield text[start : token.start()]
                    start = token.start()
        yield text[start:]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """As `Tokenizer.decode`. Ids without a token become nothing: a model has more ids than its tokenizer."""
        if self._decoder is not None:
            return str(self._decoder.decode(ids, skip_special_tokens=False))
        own_ids = [i for i in ids if i in self._vocabulary]
        return str(self._tokenizer.decode(own_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @functools.cached_property
    def _vocabulary(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_vocab().values())

    def is_end(self, token_id: int) -> bool:
        return token_id in self._ends

    def stops(self, token_id: int) -> bool:
        return self._ends.stops(token_id)

    def learn_end(self, token_id: int) -> bool:
        return self._ends.learn(token_id)

    def said(self, ids: tuple[int, ...], text: str) -> str:
        if not ids or not self.is_end(ids[-1]):
            return text
        closing = self._ends.closing
        if closing and text.endswith(closing):
            return text.removesuffix(closing)
        count = len(ids) - 1
        while count and self.stops(ids[count - 1]):
            count -= 1
        return self.decode(ids[:count])

    def behind_end(self, text: str, end: int) -> str:
        closing, sampled = self._ends.closing, self.decode((end,))
        if closing and text.startswith(closing):
            before, there, behind = text.partition(sampled)
            return behind if there and len(before) < len(closing) else text.removeprefix(closing)
        printed = (one for one in (sampled, *self._ends.printed) if one and text.startswith(one))
        return text.removeprefix(next(printed, ""))

    @property
    def shape(self) -> Shape:
        return self._template.shape

    def demand_usable(self) -> None:
        """Raises EnvironmentUnusable for a chat template that does not print what agents and models say."""
        if fault := self._template.form.fault:
            raise EnvironmentUnusable(
                f"the chat template of {self.name!r} cannot show a conversation: {fault}; set {_FLAG} to a folder "
                "whose chat template prints the texts of system, user and assistant in several turns"
            )

    def dated(self, at: float) -> HubTokenizer:
        other = copy.copy(self)
        other._at = at
        return other

    def call_opening(self, name: str | None) -> str:
        """How a completion begins that calls a tool: this one, or (None) any. Raises RecordError."""
        if self.call_format is None:
            raise RecordError("the model's chat template shows no calls of tools")
        return forced(self.call_format, name, self._template.text)

    def last_end(self, text: str) -> int | None:
        return self._ends.last_in(text)

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool, tools: Tools = ()) -> str:
        """The chat template's text. Raises RecordError for roles in an order the template does not know."""
        return self._template.render(messages, generation_prompt=generation_prompt, tools=tools, at=self._at)


def load_tokenizer(
    name: str,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    here_only: bool = False,
    call_format: CallFormat | None = None,
) -> HubTokenizer:
    """Blocking: seconds of imports. Raises EnvironmentUnusable within about 3 s where it is not available (with
    `here_only`: on this machine); ConfigError for `template_kwargs` that are the library's own parameters."""
    folder = check_source(name, here_only=here_only)
    try:
        tokenizer = auto_tokenizer().from_pretrained(
            str(folder or name), local_files_only=folder is not None, trust_remote_code=False
        )
        model_ends = _model_ends(name, folder)
    except EnvironmentUnusable:
        raise
    except Exception as error:  # transformers raises anything from OSError to KeyError here
        first = str(error).strip().split("\n")[0][:200]
        raise EnvironmentUnusable(
            f"tokenizer {name!r} cannot be loaded ({type(error).__name__}: {first}); "
            f"set {_FLAG} to a folder or hub id with a tokenizer"
        ) from error
    if not getattr(tokenizer, "chat_template", None):
        raise EnvironmentUnusable(
            f"tokenizer {name!r} has no chat template; set {_FLAG} to the one of an instruct or chat model"
        )
    return HubTokenizer(tokenizer, name, template_kwargs, call_format, model_ends)


def _model_ends(name: str, folder: Path | None) -> frozenset[int] | None:
    """The ends that the model's generation_config.json names. Raises EnvironmentUnusable."""
    if folder is not None:
        return ends_in(folder / _GENERATION)
    from transformers.utils.hub import cached_file

    with contextlib.suppress(OSError):  # the model has no such file
        return ends_in(Path(str(cached_file(name, _GENERATION))))
    return None


def tokenizer_here(name: object, template_kwargs: object = None) -> HubTokenizer | None:
    """The tokenizer that a run directory names. None where it is not on this machine, or the name is no name."""
    if not isinstance(name, str) or "\0" in name or name.lower() in ("", "none"):
        return None
    try:
        return load_tokenizer(name, template_kwargs if isinstance(template_kwargs, dict) else {}, here_only=True)
    except (EnvironmentUnusable, ConfigError):
        return None


def auto_tokenizer() -> Any:
    """Imports transformers without its notice that torch is missing and its other warnings."""
    logging.getLogger("transformers").addFilter(_is_error)
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers.AutoTokenizer


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "TRANSFORMERS_VERBOSITY" in os.environ


def check_source(name: str, *, here_only: bool = False) -> Path | None:
    """The folder on this machine that holds the tokenizer; None: the hub has to be asked. Raises
    EnvironmentUnusable. Blocking, but quick; loading may still fail."""
    if folder := tokenizer_folder(name):
        files = [folder / f for f in ("tokenizer.json", "tokenizer_config.json", "vocab.json")]
        if not any(file.is_file() for file in files):
            raise EnvironmentUnusable(
                f"{name!r} holds no tokenizer; set {_FLAG} to a folder with a tokenizer.json"
            )
        for file in files:
            _check_json(file, "model" if file.name == "tokenizer.json" else None)
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise EnvironmentUnusable(f"tokenizer folder {name!r} does not exist; set {_FLAG} to one that does")
    if cached := _cached(name):
        return cached
    if here_only:
        raise EnvironmentUnusable(f"tokenizer {name!r} is not on this machine")
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise EnvironmentUnusable(
            f"tokenizer {name!r} is not on this machine and HF_HUB_OFFLINE is set; set {_FLAG} to a local folder"
        )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{endpoint}/api/models/{name}", method="HEAD")  # noqa: S310 - fixed scheme
    try:
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        # Gated models answer 401 or 403 without a token; transformers may still have one.
        if error.code == 404 or (error.code == 401 and not _hub_token()):
            raise EnvironmentUnusable(
                f"tokenizer {name!r} is not on the hub, or not open to you; "
                f"set {_FLAG} to a local folder or another hub id"
            ) from error
    except (OSError, ValueError) as error:
        raise EnvironmentUnusable(
            f"tokenizer {name!r} is not on this machine and the hub cannot be reached; "
            f"set {_FLAG} to a local folder (or to none, for `process` and `evaluate` without token ids)"
        ) from error
    return None


def tokenizer_folder(name: str) -> Path | None:
    """The folder of this name, if there is one. A hub id need not be a valid path."""
    try:
        folder = path_of(name)
    except ValueError:
        return None
    return folder if folder.is_dir() else None


def _check_json(file: Path, key: str | None) -> None:
    """Raises EnvironmentUnusable unless the file is a JSON object with `key` in it."""
    try:
        content = orjson.loads(file.read_bytes()) if file.is_file() else {key: None}
    except (OSError, ValueError) as error:
        content = str(error)[:100]
    if not isinstance(content, dict) or (key is not None and key not in content):
        why = content if isinstance(content, str) else "something else is in it"
        raise EnvironmentUnusable(
            f"{file} is not what it must be ({why}); set {_FLAG} to a folder with a whole tokenizer"
        )


def _cached(name: str) -> Path | None:
    """The tokenizer's folder in the hub client's cache: loading it by its id would ask the hub."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    model = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / ("models--" + name.replace("/", "--"))
    with contextlib.suppress(OSError):
        snapshots = [file.parent for file in model.glob("snapshots/*/tokenizer_config.json")]
        main = model / "refs" / "main"
        newest = main.read_text().strip() if main.is_file() else ""
        matches = (folder for folder in snapshots if folder.name == newest)
        return next(matches, snapshots[0] if snapshots else None)
    return None


def _hub_token() -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
