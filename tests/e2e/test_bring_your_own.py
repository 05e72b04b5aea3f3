"""docs/bring-your-own.md, block by block: every file is written, every command is run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import docker
import pytest

from orchestrator.launch.image.context import BuildContext, context_root
from orchestrator.launch.names import DEFAULT_IMAGE, LABEL_CONTEXT
from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.guide import Followed, follow, run
from tests.fakes.runs import ROOT, lines, place

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.timeout(900)]

GUIDE = ROOT / "docs" / "bring-your-own.md"
# The sum of the prices, also as a file; with the package of the image where there is one.
ADDS_UP = """\
import csv, os
total = sum(float(row['price']) for row in csv.DictReader(open('/attachments/prices.csv')))
os.makedirs('output/more')
open('output/sum.txt', 'w').write(f'{total:.2f}')
open('output/more/empty', 'w').close()
os.symlink('/etc/passwd', 'output/link')
try:
    from money import cents
except ImportError:
    cents = None
print(total, cents and 'with the package')"""
SCRIPT = {
    "items in prices.csv": [
        [says("I add.", ADDS_UP), answers("cents('4.50') / 100 if cents else total")],
        [says("I guess.", "guess = 4.51"), answers("guess")],
    ],
    "An apple costs": [[answers("1.5")], [answers("3")]],
}
DOCUMENTS = """\
import io, pandas, docx, pptx, pypdf
from PIL import Image
pandas.DataFrame({'n': [1, 2]}).to_excel('t.xlsx', index=False)
pandas.DataFrame({'n': [3]}).to_csv('t.csv', index=False)
word = docx.Document(); word.add_paragraph('four'); word.save('t.docx')
deck = pptx.Presentation(); slide = deck.slides.add_slide(deck.slide_layouts[0])
slide.shapes.title.text = 'five'; deck.save('t.pptx')
pdf = pypdf.PdfWriter(); pdf.add_blank_page(72, 72); pdf.write('t.pdf')
Image.new('RGB', (6, 6), 'red').save('t.png')
found = [
    int(pandas.read_excel('t.xlsx')['n'].sum()), int(pandas.read_csv('t.csv')['n'].sum()),
    docx.Document('t.docx').paragraphs[0].text, pptx.Presentation('t.pptx').slides[0].shapes.title.text,
    len(pypdf.PdfReader('t.pdf').pages), Image.open('t.png').getpixel((0, 0))[0],
]"""


@pytest.fixture(scope="module")
def followed() -> Iterator[Followed]:
    image = f"test-{uuid.uuid4().hex[:12]}:1"
    with scripted_endpoint(SCRIPT) as endpoint, place() as home:
        text = (
            GUIDE.read_text("utf-8")
            .replace("http://localhost:9001/v1", endpoint.base_url)
            .replace("my-model", "scripted")
        )
        text = text.replace("my-sandbox:1", image).replace("rollout-orchestrator-sandbox:0.1.0", DEFAULT_IMAGE)
        try:
            with follow(text, home) as followed:
                yield followed
        finally:
            engine = docker.from_env(timeout=120)
            if engine.images.list(image):
                engine.images.remove(image, force=True)
            engine.close()


def test_a_task_with_a_file_is_solved_and_its_output_comes_back(followed: Followed) -> None:
    assert followed.scores("task")[0] <= 0.45 < 0.5 < followed.scores("task")[1]
    (right,) = [line for line in followed.rollouts("task") if line["answer"] == "4.5"]
    files = [{"path": "sum.txt", "size_bytes": 4}, {"path": "more/empty", "size_bytes": 0}]
    assert right["output"] == {"files": files, "left_out": 1, "complete": True}
    folder = followed.home / "runs" / "task" / "output"
    assert [p.name for p in folder.iterdir()] == [right["rollout_id"]]
    assert (folder / str(right["rollout_id"]) / "sum.txt").read_text() == "4.50"
    (wrong,) = [line for line in followed.rollouts("task") if line is not right and line["answer"] == "4.51"]
    assert wrong["output"] == {"files": [], "left_out": 0, "complete": True}


def test_a_source_of_tasks_is_read_and_filtered(followed: Followed) -> None:
    assert {line["task_id"] for line in followed.rollouts("source")} == {"apples-1", "apples-2"}
    assert {line["level"] for line in followed.rollouts("source")} == {"easy"}


def test_a_scorer_grades_in_its_own_way(followed: Followed) -> None:
    assert followed.scores("scorer") == [0.5, 1.0]
    for line in followed.rollouts("scorer"):
        parts = line["score_parts"]
        assert isinstance(parts, dict)
        assert set(parts) == {"a_number", "off_by"}, "nothing is added to its word"


def test_an_image_brings_its_packages(followed: Followed) -> None:
    assert any("can serve" in said for said in followed.said.values())
    assert len(followed.scores("image")) == 2
    (right,) = [line for line in followed.rollouts("image") if line["answer"] == "4.5"]
    assert "4.5 with the package" in json.dumps(right["completions"])
    assert "4.5 with the package" not in json.dumps(followed.rollouts("task"))


def test_documents_of_the_usual_kinds_are_read() -> None:
    documents = f"{DEFAULT_IMAGE}-documents"
    engine = docker.from_env(timeout=120)
    digests = [there.labels.get(LABEL_CONTEXT) for there in engine.images.list(documents)]
    if BuildContext.read(context_root(), ["documents"]).digest not in digests:
        pytest.skip(f"no {documents} of this source: `orchestrator image build --with documents` makes it")
    programs = [
        engine.containers.run(image, ["-c", "ls /opt/sandbox/bin"], entrypoint="/bin/sh", remove=True)
        for image in (DEFAULT_IMAGE, documents)
    ]
    engine.close()
    assert programs[0] == programs[1], "the runtime is the same in both: a machine keeps one"
    script = {"documents": [[says("I read.", DOCUMENTS), answers("found")]]}
    with scripted_endpoint(script) as endpoint, place() as home:
        task = {"question": "What is in the documents?", "answer": "x", "limits": {"step_timeout": 200}}
        (home / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        run(
            f"orchestrator process --openai.base_url {endpoint.base_url} --openai.model_name scripted "
            f"--env.tokenizer_name none --env.group_size 1 --env.dataset jsonl:tasks.jsonl --env.run_dir run "
            f"--env.sandbox_image {documents}",
            home,
        )
        (line,) = lines(home / "run" / "rollouts.jsonl")
        assert line["answer"] == str([3, 3, "four", "five", 1, 255]), line
