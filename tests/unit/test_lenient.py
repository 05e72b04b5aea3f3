"""Lines are read without their long arrays of numbers, and are otherwise what they are."""

from __future__ import annotations

import json

import pytest

from orchestrator.run.lenient import parse, parse_without

ARRAYS = (b'"ids":[', b'"logprobs":[')
TEXT = 'a text with "ids":[1,2] and "logprobs":[3], and \\"ids":[4'


@pytest.mark.parametrize("value", [[], [1, -2.5e-7, 3], [1, None], [[1], [2, 3]]])
def test_arrays_of_numbers_are_empty_and_all_else_is_as_it_is(value: object) -> None:
    line = {"ids": value, "text": TEXT, "turns": [{"ids": [7], "logprobs": value, "end": TEXT}], "last": [1, 2]}
    read = parse_without(json.dumps(line, separators=(",", ":")).encode(), ARRAYS)
    assert read is not None
    assert read["turns"][0]["ids"] in ([], [7])
    assert {**read, "ids": value, "turns": [{**read["turns"][0], "ids": [7], "logprobs": value}]} == line


@pytest.mark.parametrize(
    "line",
    [
        b'{"ids":["a"],"logprobs":[{"x":1}],"a":1}',
        b'{"ids":[NaN],"a":1}',
        b'{"ids":[1',
        b'{"ids":["',
        b'{"ids":[',
        b'{"a":"ids":[1],"b":2}',
        b'"ids":[1],"logprobs":[2],""',
        b'{"ids":"ids":["ids":[',
        b"[]",
        b"",
        b'{"ids":[1], "logprobs" : [2] , "a":1}',
    ],
)
def test_other_lines_are_read_or_refused_as_ever(line: bytes) -> None:
    read, whole = parse_without(line, ARRAYS), parse(line)
    assert (read is None) == (whole is None)
    if read is not None and whole is not None:
        assert {**whole, "ids": 0} == {**read, "ids": 0}
