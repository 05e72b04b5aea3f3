"""`orchestrator download-gaia` with the hub's real client, against a hub on a loopback port.

The trees have the two shapes GAIA was published in; their rows are made here.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.cli import main
from orchestrator.tasks import open_tasks
from orchestrator.tasks.gaia.download import ANNOTATED, RAW
from orchestrator.types import BadTask, Task
from tests.fakes.hub import FakeHub

MEMBER, STRANGER = "hf_memberCANARY", "hf_strangerCANARY"
COMMAND = "import sys; from orchestrator.cli import main; sys.exit(main())"
DOCUMENT = b"%PDF" + bytes(range(256)) * 40


def row(number: int, level: int, *, answer: str = "", file_name: str = "", **more: Any) -> dict[str, Any]:
    notes = {"Steps": "1. Look.", "Number of steps": "1", "Tools": "None", "Number of tools": "0"}
    return {
        "task_id": f"task-{number}",
        "Question": f"What is {number}?",
        "Level": level,
        "Final answer": answer or str(number),
        "file_name": file_name,
        "Annotator Metadata": notes | {"How long did this take?": "1 minute"},
    } | more


VALIDATION = [row(1, 1), row(2, 1, file_name="task-2.pdf"), row(3, 2, file_name="task-3.py"), row(4, 3)]
TEST = [row(5, 1, answer="?"), row(6, 2, answer="?", file_name="task-6.csv")]
FILES = {
    "2023/validation/task-2.pdf": DOCUMENT,
    "2023/validation/task-3.py": b"print(3)\n",
    "2023/test/task-6.csv": b"a,b\n1,2\n",
}
AROUND = {".gitattributes": b"*.pdf filter=lfs\n", "README.md": b"---\ngated: true\n---\n# GAIA\n"}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(columns).encode() + b"\n" for columns in rows)


def table(rows: list[dict[str, Any]], split: str) -> bytes:
    columns = [
        {
            **columns,
            "Level": str(columns["Level"]),
            "file_path": f"2023/{split}/{columns['file_name']}" if columns["file_name"] else "",
        }
        for columns in rows
    ]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(columns), file)
    return file.getvalue()


def annotated_tree() -> dict[str, bytes]:
    """Rows whose columns change their type, as they do not load as JSON: a test row without notes, a number."""
    bare = {name: value for name, value in TEST[0].items() if name != "Annotator Metadata"}
    odd = {**TEST[1], "Final answer": 6, "Annotator Metadata": {"Number of steps": 3}}
    return {
        **AROUND,
        "GAIA.py": b"raise SystemExit('a loader script ran')\n",
        "2023/validation/metadata.jsonl": lines(VALIDATION),
        "2023/test/metadata.jsonl": lines([bare, odd]),
        **FILES,
        "2023/validation/task-2.png": b"\x89PNG screenshot of the document",
    }


def raw_tree() -> dict[str, bytes]:
    tree = {**AROUND, **FILES}
    for split, rows in (("validation", VALIDATION), ("test", TEST)):
        tree[f"2023/{split}/metadata.parquet"] = table(rows, split)
        for level in {columns["Level"] for columns in rows}:
            part = [columns for columns in rows if columns["Level"] == level]
            tree[f"2023/{split}/metadata.level{level}.parquet"] = table(part, split)
    return tree


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeHub]:
    async with FakeHub({ANNOTATED: annotated_tree(), RAW: raw_tree()}) as hub:
        hub.members, hub.strangers = {MEMBER}, {STRANGER}
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", MEMBER)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "gaia"


async def download(folder: Path, *words: str) -> int:
    argv = ["download-gaia", "--output-dir", str(folder), *words]
    return await asyncio.wait_for(asyncio.to_thread(main, argv), 120)


def tasks(folder: Path, split: str = "validation") -> list[Task | BadTask]:
    return list(open_tasks("gaia", dataset_path=folder, split=split))


def task_ids(folder: Path) -> list[str]:
    assert not [task for task in tasks(folder) if isinstance(task, BadTask)]
    return [task.task_id for task in tasks(folder)]


def loaded(folder: Path, config: str | None, split: str, cache: Path) -> list[dict[str, Any]]:
    import datasets

    return list(datasets.load_dataset(str(folder), config, split=split, cache_dir=str(cache)))


def present(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


@pytest.mark.parametrize("raw", [False, True], ids=["annotated", "raw"])
async def test_what_is_left_opens_with_datasets_and_with_process(
    hub: FakeHub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], raw: bool
) -> None:
    assert await download(folder, *["--use-raw"] * raw) == 0
    said = capsys.readouterr().out
    assert ["validation", "4", "2", "1", "1", "2"] in [line.split()[:6] for line in said.splitlines()]
    assert ["test", "2", "1", "1", "0", "1"] in [line.split()[:6] for line in said.splitlines()]

    assert task_ids(folder) == ["task-1", "task-2", "task-3", "task-4"]
    (attachment,) = next(task for task in tasks(folder) if task.task_id == "task-2").attachments  # type: ignore[union-attr]
    assert attachment.path.read_bytes() == DOCUMENT
    for split, ids in (("validation", [1, 2, 3, 4]), ("test", [5, 6])):
        rows = loaded(folder, "2023_all", split, tmp_path / "cache")
        assert [columns["task_id"] for columns in rows] == [f"task-{number}" for number in ids]
        assert {type(columns["Level"]) for columns in rows} == {str}
        for columns in rows:
            assert not columns["file_name"] or (folder / columns["file_path"]).is_file()
    level_2 = loaded(folder, "2023_level2", "validation", tmp_path / "cache")
    assert [columns["Question"] for columns in level_2] == ["What is 3?"]
    assert loaded(folder, None, "validation", tmp_path / "cache")

    assert not [file for file in folder.rglob("*") if file.is_symlink()]
    assert {file.name for file in folder.iterdir()} == {"2023", "README.md", "download.json"}
    assert ("2023/validation/task-2.png" in present(folder)) is not raw


async def test_a_complete_folder_is_not_asked_about_again(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await download(folder) == 0
    asked = len(hub.asked)
    assert await download(folder) == 0
    assert await download(folder, "--revision", hub.commit(ANNOTATED)) == 0
    assert len(hub.asked) == asked
    assert capsys.readouterr().out.count("already complete") == 2
    assert await download(folder, "--revision", "main") == 0  # a branch may have moved: one question, no file
    assert len(hub.asked) == asked + 1
    assert "already complete" in capsys.readouterr().out


async def test_a_moved_branch_replaces_the_folder(hub: FakeHub, folder: Path) -> None:
    assert await download(folder) == 0
    tree = annotated_tree()
    del tree["2023/validation/task-2.png"]
    hub.trees[ANNOTATED] = {**tree, "2023/validation/metadata.jsonl": lines(VALIDATION[:2])}
    assert await download(folder, "--revision", "main") == 0
    assert task_ids(folder) == ["task-1", "task-2"]
    assert "2023/validation/task-2.png" not in present(folder)


async def test_a_damaged_folder_is_fetched_again(hub: FakeHub, folder: Path) -> None:
    assert await download(folder) == 0
    (folder / "2023/validation/task-2.pdf").write_bytes(DOCUMENT[:100])
    assert await download(folder) == 0
    assert (folder / "2023/validation/task-2.pdf").read_bytes() == DOCUMENT


@pytest.mark.parametrize("raw", [False, True], ids=["annotated", "raw"])
async def test_chosen_levels_keep_only_their_rows_and_files(
    hub: FakeHub, folder: Path, tmp_path: Path, raw: bool
) -> None:
    assert await download(folder, "--level", "1,3", *["--use-raw"] * raw) == 0
    assert sorted(task_ids(folder)) == ["task-1", "task-2", "task-4"]
    rows = loaded(folder, "2023_all", "validation", tmp_path / "cache")
    assert sorted(columns["task_id"] for columns in rows) == ["task-1", "task-2", "task-4"]
    assert "2023/validation/task-2.pdf" in present(folder)
    assert ("2023/validation/task-2.png" in present(folder)) is not raw  # no row names it, its task does
    assert not {"2023/validation/task-3.py", "2023/test/task-6.csv"} & present(folder)
    assert await download(folder, *["--use-raw"] * raw) == 0  # all of them
    assert len(task_ids(folder)) == 4


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (STRANGER, ["no access yet", "request it at", f"/datasets/{ANNOTATED}", "fine-grained"]),
        ("hf_unknownCANARY", ["does not accept the token", "hf auth login"]),
    ],
)
async def test_without_access_one_line_says_what_to_do(
    hub: FakeHub,
    folder: Path,
    token: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert await download(folder) == 3
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("orchestrator:")]
    assert [word for word in words if word not in line] == []
    assert "CANARY" not in line
    assert not (folder / "2023").exists()


async def test_a_repository_the_hub_hides_is_no_access_either(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del hub.trees[RAW]
    assert await download(folder, "--use-raw") == 3
    assert f"no access yet: request it at {hub.url}/datasets/{RAW}" in capsys.readouterr().err
    assert not folder.exists()


async def test_an_unknown_revision_is_a_usage_error(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await download(folder, "--revision", "nowhere") == 2
    assert f"--revision: {ANNOTATED} has no 'nowhere'" in capsys.readouterr().err


async def test_a_hub_that_cannot_be_reached_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert await download(folder) == 3
    assert "offline: http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert not folder.exists()


async def test_an_unwritable_folder_is_a_usage_error(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert await download(tmp_path / "file" / "gaia") == 2
    assert "--output-dir: cannot write in" in capsys.readouterr().err


async def test_files_of_somebody_else_are_not_overwritten(hub: FakeHub, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("my own")
    assert await download(folder) == 2
    assert (folder / "README.md").read_text() == "my own"
    assert hub.asked == []


@pytest.mark.parametrize(
    "name", ["2023/../../outside.txt", "/outside.txt", "2023//x", "..", "C:/x", "2023\\..\\x", "2023/test/a\nb"]
)
async def test_a_listing_that_leaves_the_folder_is_refused_unfetched(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    hub.trees[ANNOTATED] = {**annotated_tree(), name: b"outside"}
    assert await download(folder) == 3
    error = capsys.readouterr().err
    assert ascii(name) in error
    assert "nothing was downloaded" in error
    assert not hub.fetched
    assert not folder.exists()


async def test_a_row_that_names_a_file_outside_is_told_and_not_followed(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*VALIDATION, row(7, 1, file_name="../../../secret.txt"), row(8, 1, file_name="missing.txt"), row(9, 9)]
    hub.trees[ANNOTATED] = {**annotated_tree(), "2023/validation/metadata.jsonl": lines(rows) + b"{torn\n"}
    assert await download(folder) == 1
    said = capsys.readouterr().out
    assert "unusable: validation task-7: file '../../../secret.txt' leaves" in said
    assert "unusable: validation task-8: file 'missing.txt'" in said
    assert "unusable: validation task-9: no level from 1 to 3" in said
    assert "unusable: validation line 8: no JSON" in said
    assert [task.task_id for task in tasks(folder) if isinstance(task, Task)][:4] == [
        f"task-{n}" for n in (1, 2, 3, 4)
    ]


async def test_a_tree_that_does_not_fit_the_disk_is_not_begun(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.listed["2023/validation/huge.mov"] = 1 << 60
    assert await download(folder) == 1
    assert "the disk is full: 1,152,921," in capsys.readouterr().err
    assert "2023/validation/task-2.pdf" not in hub.fetched


async def test_a_torn_transfer_is_made_whole(hub: FakeHub, folder: Path) -> None:
    torn = "2023/validation/task-2.pdf"
    hub.torn[torn] = 5000
    assert await download(folder) == 0
    assert hub.fetched[torn] == 2
    assert (folder / torn).read_bytes() == DOCUMENT


async def run_process(folder: Path, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, "download-gaia", "--output-dir", str(folder)),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def is_known(folder: Path, name: str) -> bool:
    """Whether the file has arrived and huggingface_hub has noted so: between the two, a killed download fetches it
    again."""
    noted = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    return (folder / name).exists() and noted.exists() and noted.read_text().count("\n") == 3


async def test_a_killed_download_goes_on_with_what_is_missing(hub: FakeHub, folder: Path) -> None:
    late = "2023/validation/task-2.png"
    others = {name for name in annotated_tree() if name.startswith("2023/")} - {late}
    hub.stalled[late] = asyncio.Event()
    process = await run_process(folder, {})
    try:
        await asyncio.wait_for(hub.stalled[late].wait(), 120)
        arrived = folder / ".download" / hub.commit(ANNOTATED)
        async with asyncio.timeout(60):
            while not all(is_known(arrived, name) for name in others):
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        await process.communicate()
    assert not (folder / "2023").exists()  # nobody can read half of it
    before = set(hub.fetched)
    hub.stalled.clear()
    hub.fetched.clear()
    assert await download(folder) == 0
    assert others <= before
    assert set(hub.fetched) == {late}
    assert (folder / "2023/validation/task-2.pdf").read_bytes() == DOCUMENT
    assert not (folder / ".download").exists()


async def test_an_interrupt_does_not_wait_for_a_dead_network(hub: FakeHub, folder: Path) -> None:
    late = "2023/validation/task-2.png"
    hub.stalled[late] = asyncio.Event()
    process = await run_process(folder, {"HF_HUB_DOWNLOAD_TIMEOUT": "300"})
    try:
        await asyncio.wait_for(hub.stalled[late].wait(), 120)
        process.send_signal(signal.SIGINT)
        said, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130
    assert b"stopped; run the command again" in said


@pytest.mark.parametrize(
    ("offline", "words"),
    [("0", f"not logged in: {ANNOTATED} is for accounts"), ("1", "offline: HF_HUB_OFFLINE is set")],
)
async def test_without_a_login_or_a_network_one_line_says_so(
    hub: FakeHub, folder: Path, tmp_path: Path, offline: str, words: str
) -> None:
    # A process of its own: the client reads its home and its switches once, at import.
    process = await run_process(
        folder, {"HF_TOKEN": "", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": offline}
    )
    _, error = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 3
    (line,) = [text for text in error.decode().splitlines() if text.startswith("orchestrator:")]
    assert words in line


async def test_two_downloads_do_not_work_in_one_folder(hub: FakeHub, folder: Path) -> None:
    late = "2023/validation/task-2.png"
    hub.stalled[late] = asyncio.Event()
    process = await run_process(folder, {})
    try:
        await asyncio.wait_for(hub.stalled[late].wait(), 120)
        assert await download(folder) == 1
    finally:
        process.kill()
        await process.communicate()
