"""docs/cases/mistral_z2_z3.md says what running it gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cases.mistral_z2_z3.__main__ import SWAPPED, TODAY, Pair, checkpoint, replay, row
from gradtrace.trace.reader import open_trace
from tests.real.releases import install

PAGE = install.ROOT / "docs/cases/mistral_z2_z3.md"
INSTALLED = os.environ.get("GRADTRACE_CASES")
PAIRS = (TODAY, *SWAPPED)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows() -> dict[str, list[str]]:
    """Return the page's first table: packages -> losses of both stages, difference, audits, verdict."""
    table = PAGE.read_text(encoding="utf-8").split("| packages |")[1].split("\n\n")[0]
    return {cells(line)[0]: cells(line)[1:] for line in table.splitlines()[2:]}


def test_the_page_lists_every_pair_and_its_story_follows_from_the_table() -> None:
    table = rows()
    assert list(table) == [pair.title for pair in PAIRS]
    fault = "diverged at step 0, micro-step 0, local_grad; inputs_differ: buffers of the model"
    assert {title for title, row in table.items() if row[-1] == fault} == {
        "transformers 4.36.2, deepspeed 0.14.4",
        "deepspeed 0.15.4",
        "transformers 4.37.2",
    }
    assert {row[-1] for row in table.values()} == {fault, "agree"}
    assert {row[-2] for row in table.values()} == {"pass, pass"}


@pytest.mark.deepspeed
def test_today_both_stages_are_bitwise_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    outcome = replay(TODAY, checkpoint(tmp_path, steps=2), tmp_path / "traces", steps=3)
    assert outcome.losses[0] == outcome.losses[1]
    assert len(outcome.losses[0]) == 3
    assert (outcome.audits, outcome.verdict) == ("pass, pass", rows()[TODAY.title][-1])
    for stage in ("zero2", "zero3"):
        trace = open_trace(tmp_path / "traces" / stage)
        assert trace.steps == (0, 1, 2)
        for rank in trace.ranks.values():
            assert rank.header.buffers is not None
            held = {entry["name"]: entry for entry in rank.header.buffers}
            assert held["model.rotary_emb.inv_freq"]["dtype"] == "float32"
        # Each rank has batches of its own: equal gradients would hide what a reduction does.
        batches = [
            [record.facts["tensors"] for record in rank.records if record.point == "input"]
            for rank in trace.ranks.values()
        ]
        assert batches[0] != batches[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.skipif(INSTALLED is None, reason="GRADTRACE_CASES names no directory for packages")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.title)
def test_each_pair_gives_what_the_page_says(pair: Pair, model: Path, tmp_path: Path) -> None:
    assert INSTALLED is not None
    Path(INSTALLED).mkdir(parents=True, exist_ok=True)
    outcome = replay(pair, model, tmp_path / "traces", packages=Path(INSTALLED).resolve())
    found, said = cells(row(pair, outcome))[1:], rows()[pair.title]
    assert found[-2:] == said[-2:]
    for mine, theirs in zip(found[:3], said[:3], strict=True):
        losses = [[float(n) for n in cell.split(" ... ")] for cell in (mine, theirs)]
        assert losses[0] == pytest.approx(losses[1], abs=0.05)  # another CPU rounds otherwise
