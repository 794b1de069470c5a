"""Reports say the verdict first, fit a terminal, and let nothing out of a trace act."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import sample_results as results
from hypothesis import given
from hypothesis import strategies as st

from gradtrace.analysis.series import Growth
from gradtrace.report import html, text
from gradtrace.report.escape import printable
from gradtrace.report.page import Bars, Commands, Page, Section, facts, section
from gradtrace.report.page_audit import audit_page
from gradtrace.report.page_demo import DemoFacts, DemoResult, demo_page
from gradtrace.report.page_diff import diff_page


def as_text(page: Page, width: int = 80) -> str:
    stream = io.StringIO()
    text.print_page(page, stream, width=width)
    return stream.getvalue()


def demo_result() -> DemoResult:
    return DemoResult(
        "demo dir/zero2",
        "demo dir/zero3",
        DemoFacts("0.19.8", False, 4, {"zero2": [1.0, 0.9], "zero3": [1.0, 0.8]}),
        results.diverged(),
        results.failed(),
        results.passed(),
    )


PAGES = {
    "diff": lambda: diff_page(results.diverged(), "a", "b"),
    "audit": lambda: audit_page(results.failed(), "a"),
    "pass": lambda: audit_page(results.passed(), "a"),
    "demo": lambda: demo_page(demo_result()),
    "inside": lambda: diff_page(results.with_envelope(outside=False), "a", "b"),
    "outside": lambda: diff_page(results.with_envelope(outside=True), "a", "b"),
    "nasty diff": lambda: diff_page(results.diverged(results.NASTY), results.NASTY, "b"),
    "nasty audit": lambda: audit_page(results.failed(results.NASTY), results.NASTY),
}


@pytest.mark.parametrize("name", PAGES)
def test_text_fits_the_terminal(name: str) -> None:
    for line in as_text(PAGES[name]()).splitlines():
        assert len(line) <= 80
        assert line == line.rstrip()


def test_diff_says_the_verdict_first() -> None:
    shown = as_text(PAGES["diff"]())
    flat = " ".join(shown.split())
    assert flat.startswith(
        "DIVERGED at step 0, micro-step 1, accumulated of layers.0.weight: baseline is wrong "
    )
    assert "baseline 0.00456" in flat
    assert "candidate 0.0123" in flat
    assert (
        "The baseline is wrong: gradients of earlier micro-steps are missing from the sum." in flat
    )
    assert "accumulated <- the runs part here BROKEN 36 of 96 holds (96)" in flat
    assert "compared 120" in flat


def test_growth_is_a_table_and_a_drawing() -> None:
    shown = " ".join(as_text(PAGES["diff"]()).split())
    assert "step gradient largest baseline loss candidate loss difference weights" in shown
    assert "0 0.7 0.02 2.5 2.5 0 equal" in shown
    assert "1 inf inf 2 2.25 0.25 differ" in shown
    assert "averaged gradient: relative L2 distance" in shown


def test_long_growth_is_thinned_and_says_so() -> None:
    growth = tuple(Growth(step, 1e-7 * (step + 1)) for step in range(100))
    page = diff_page(replace(results.verdict_only("rounding"), growth=growth), "a", "b")
    shown = as_text(page)
    assert "20 of 100 steps are shown; --json has all." in shown
    assert "step 99" in shown


@pytest.mark.parametrize("outside", (False, True))
def test_the_envelope_is_read_out(outside: bool) -> None:
    page = PAGES["outside" if outside else "inside"]()
    shown = " ".join(as_text(page).split())
    assert shown.startswith("ROUNDING")
    assert "Noise envelope What follows from it. 2 perturbed runs (sample 0, 3)" in shown
    assert "a chance of 0.33; by its worst step it ranks at p = 0.33" in shown
    assert ("21 0.7 1e-07 7e+06 outside" in shown) == outside  # the first outside is never thinned
    assert "of 40 steps are shown" in shown
    assert "Noise envelope" in html.render(page)


@pytest.mark.parametrize(
    ("verdict", "notes", "expected"),
    [
        ("agree", (), "AGREE: everything compared is bitwise equal"),
        ("rounding", (), "ROUNDING: the runs differ by no more than rounding explains"),
        ("not_comparable", ("other models",), "NOT COMPARABLE: other models"),
        ("inconclusive", ("a gap",), "INCONCLUSIVE: a gap"),
    ],
)
def test_every_verdict_of_diff(verdict: str, notes: tuple[str, ...], expected: str) -> None:
    page = diff_page(results.verdict_only(verdict, *notes), "a", "b")
    assert as_text(page).splitlines()[0] == expected


def test_audit_says_the_verdict_first() -> None:
    shown = " ".join(as_text(PAGES["audit"](), 200).split())
    assert shown.startswith(
        "FAIL: law accumulate is broken at step 0, micro-step 1, accumulated of"
    )
    assert "expected 0.0123 found nan" in shown
    assert "end_to_end dropped_micro_steps 1 step 0, micro-step 1, rank 0" in shown
    assert "accumulate_local: local_accum is absent (12)" in shown
    assert as_text(PAGES["pass"]()).startswith(
        "PASS: every law that could be checked holds (1056 ch"
    )


def test_demo_tells_its_story() -> None:
    shown = " ".join(as_text(PAGES["demo"]()).split())
    assert shown.startswith("DIVERGED at step 0, micro-step 1, accumulated of layers.0.weight")
    for words in ("ZeRO-2 FAIL", "ZeRO-3 PASS", "gradient_accumulation_steps: 4", "--html"):
        assert words in shown
    assert "planted" not in shown
    # Commands can be copied, whatever the directory is called.
    assert "gradtrace audit 'demo dir/zero2'" in shown


def test_demo_that_found_nothing_says_so() -> None:
    calm = results.verdict_only("agree")
    facts_ = DemoFacts("1.0", True, 4, {})
    result = DemoResult("a", "b", facts_, calm, results.passed(), results.passed())
    assert not result.convincing
    shown = as_text(demo_page(result))
    assert shown.startswith("The demo did not find what it promises")
    assert "planted" in shown


@pytest.mark.parametrize("name", ["nasty diff", "nasty audit"])
def test_nothing_from_a_trace_reaches_the_terminal_raw(name: str) -> None:
    shown = as_text(PAGES[name]())
    assert not set(re.findall(r"[\x00-\x1f\x7f-\x9f\u202e\u2028\ud800]", shown)) - {"\n"}
    assert "\\x1b" in shown
    assert "[red]" in "".join(shown.split())


class Reader(HTMLParser):
    """Collect tags and text as a browser would."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("name", PAGES)
def test_html_is_self_contained_and_escaped(name: str) -> None:
    page = PAGES[name]()
    source = html.render(page)
    source.encode("utf-8")
    reader = Reader()
    reader.feed(source)
    assert html.MARK in source[:1024]
    assert not set(reader.tags) & {"script", "link", "img", "iframe", "object"}
    assert not {name for name, _ in reader.attributes} & {"src", "href", "onerror", "onload"}
    assert "url(" not in source
    assert printable(page.verdict) in reader.words


def test_html_shows_what_text_shows() -> None:
    source = html.render(PAGES["diff"]())
    for words in ("The baseline is wrong", "BROKEN 36 of 96", "bitwise equal", "layers.0.weight"):
        assert words in source


def test_bars_span_from_the_smallest_to_the_largest() -> None:
    page = PAGES["diff"]()
    bars = [b for s in page.sections for b in s.blocks if isinstance(b, Bars)]
    lengths = {bar.label: round(bar.length, 2) for bar in bars[0].bars}
    assert lengths == {"step 0": 0.0, "step 1": 0.05, "step 2": 1.0}
    assert [bar.value.text for bar in bars[1].bars] == ["0.7", "inf"]


def test_plain_streams_get_plain_characters() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text.print_page(PAGES["diff"](), stream, width=80)
    stream.flush()
    assert b"###" in stream.buffer.getvalue()  # type: ignore[attr-defined]


def test_long_commands_break_as_a_shell_reads_them() -> None:
    command = "gradtrace show 'a b' " + " ".join(f"--option{n} value{n}" for n in range(9))
    page = Page("t", "v", "plain", "", (Section("s", (Commands(((command, "m"),)),)),))
    body = as_text(page).split("# m\n")[1]
    assert " \\\n" in body
    assert " ".join(body.replace("\\\n", "").split()) == command


@given(st.text())
def test_printable_leaves_no_control(raw: str) -> None:
    shown = printable(raw)
    assert shown.isprintable()
    if raw.isprintable():
        assert shown == raw


def test_empty_parts_vanish() -> None:
    assert section("Nothing", facts(("a", None)), None) is None
