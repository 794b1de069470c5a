"""What a bug report must not say, and what it must still say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis.scrub import PATH, SECRET, scrub, scrub_text

KNOWN = {"node-17.corp": "host-1", "/data/anna/run": "trace-1", "run": "trace-1"}


@pytest.mark.parametrize(
    "text",
    [
        "/home/anna/model.bin",
        "~/model",
        "./x/y",
        "../secret-project",
        "s3://bucket/secret-project/x",
        "secret-project/checkpoints",
        r"C:\Users\anna\x",
        "https://internal.example/secret-project",
    ],
)
def test_paths_go(text: str) -> None:
    assert scrub_text(text, {}) == PATH
    told = scrub_text(f"see {text}, then ('{text}').", {})
    assert told == f"see {PATH}, then ('{PATH}')."


@pytest.mark.parametrize(
    "text",
    [
        "that is 1/4 of what was asked for",
        "clipped = master / factor",
        "the loss is 0.25/0.5",
        "layers.0.weight of rank 1: 3 of 4 broken (NaN, -inf)",
        "zero_optimization.stage differs: 1 against 2",
    ],
)
def test_verdicts_stay(text: str) -> None:
    assert scrub_text(text, {}) == text


def test_known_words_go_as_whole_words_only() -> None:
    assert scrub_text("node-17.corp lost run 3", KNOWN) == "host-1 lost trace-1 3"
    assert scrub_text("run_id of runs", KNOWN) == "run_id of runs"
    assert scrub_text("at /data/anna/run", KNOWN) == "at trace-1"


def test_secrets_go_by_their_key_and_names_stay() -> None:
    config = {
        "wandb": {"api_key": "abc", "project": "a/b", "enabled": True},
        "hf_token": "abc",
        "tokens": 12,
        "param": "a/b.weight",
        "list": ["x/y", 1, None],
    }
    assert scrub(config, {}) == {
        "wandb": {"api_key": SECRET, "project": PATH, "enabled": True},
        "hf_token": SECRET,
        "tokens": 12,
        "param": "a/b.weight",
        "list": [PATH, 1, None],
    }


@given(st.lists(st.text("abcXYZ019._-~", min_size=1), min_size=2, max_size=5))
def test_no_directory_survives(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    if any(character.isalpha() for character in path):
        assert scrub_text(f"found {path} there", {}) == f"found {PATH} there"
