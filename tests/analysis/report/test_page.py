"""The page: its numbers, its structure, its escaping, and the command that writes it."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import Quiet, small
from markupsafe import escape

from past_opsd.analysis import report
from past_opsd.analysis.report import answers, data, figures, page, summary, trajectories
from past_opsd.analysis.report.data import Run
from past_opsd.core import stats
from past_opsd.core.nouns import PastError
from past_opsd.interface import arguments, commands
from past_opsd.run.evaluate import Evaluation, TaskResult, stack
from past_opsd.run.train import train

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>\u2028&amp;\"'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds."""
    root = tmp_path_factory.mktemp("page") / "compared"
    for name in ("past", "opsd"):
        for seed in (17, 29):
            settings = ("run.cycles=2", "run.keep_checkpoints=9", "evaluation.at=[0.0, 1.0]", f"run.seed={seed}")
            recipe = small(f"embedded/{name}", *settings, "rollout.problems_per_cycle=4")
            train(recipe, root / f"{name}-{seed}", False, Quiet())
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    return data.find([folder])


def _first_panels(runs: list[Run]) -> list[figures.Figure]:
    """Every figure with its first panel alone, to save the time of drawing."""
    return [replace(figure, panels=figure.panels[:1]) for figure in figures.figures(runs)]


@pytest.fixture(scope="module")
def html(runs: list[Run]) -> str:
    drawn = _first_panels(runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.figures, "figures", lambda _: drawn)
        return report.render(runs, trajectories=2)


class Document(HTMLParser):
    """Ids, references, text and elements that are open at the end."""

    void = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.void:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "data", "action", "srcset", "poster"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.void:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def _bare(runs: list[Run], browser: dict[str, Any] | None = None) -> str:
    """A page without figures."""
    empty = {"unit": 1, "limits": {}, "runs": [], "vocabulary": [], "trajectories": []}
    return page.page(page.Content(runs, data.methods(runs), [], browser or empty, {}))


def test_the_document_is_whole_and_points_only_into_itself(html: str) -> None:
    document = Document(html)
    assert document.stack == []
    assert len(document.ids) == len(set(document.ids))
    assert {"summary", "learning", "teacher", "cost", "health", "trajectories", "recipe"} <= set(document.ids)
    inner = [r for r in document.references if r != "data:,"]
    assert len(inner) > 10
    assert [r for r in inner if not r.startswith("#") or r[1:] not in document.ids] == []
    assert f'content="{page.POLICY}"' in html
    assert "default-src 'none'" in page.POLICY
    assert document.tags.count("script") == 2
    assert not set(document.tags) & {"iframe", "object", "embed", "img", "form", "video", "audio"}


def test_sections_stand_in_reading_order(html: str) -> None:
    ids = Document(html).ids
    order = [
        "summary",
        "learning",
        "answers",
        "teacher",
        "objectives",
        "sampling",
        "privilege",
        "cost",
        "cycle",
        "health",
    ]
    found = [ids.index(i) for i in [*order, "trajectories", "recipe"] if i in ids]
    assert found == sorted(found)
    assert len(found) >= 8


def test_every_figure_has_its_caption_and_its_numbers(html: str, runs: list[Run]) -> None:
    document = Document(html)
    drawn = _first_panels(runs)
    assert len(drawn) >= 8
    for figure in drawn:
        assert f"figure-{figure.name}" in document.ids
        assert " ".join(figure.caption.split()) in document.words
        for panel in figure.panels:
            header, rows = panel.table
            assert rows
            assert f'<th scope="col">{escape(str(header[0]))}</th>' in html
            assert escape(str(rows[-1][-1])) in html
    assert document.tags.count("svg") >= len(drawn)


def test_no_panel_is_drawn_twice(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """What several figures of the paper have is drawn in the first; the others lead there, their files keep it."""
    monkeypatch.setattr(page, "svg", lambda panel: f'<svg data-name="{panel.name}"></svg>')
    made = figures.figures(runs)
    empty = {"unit": 1, "limits": {}, "runs": [], "vocabulary": [], "trajectories": []}
    text = page.page(page.Content(runs, data.methods(runs), made, empty, {}))
    shown = [p for figure in made for p in figure.panels if f'data-name="{p.name}"' in text]
    keys = [p.shows for p in shown if p.shows]
    assert len(keys) == len(set(keys))
    assert set(keys) == {p.shows for figure in made for p in figure.panels if p.shows}
    by_name = {figure.name: figure for figure in made}
    assert len(by_name["teacher-dynamics"].panels) > 2
    part = text[text.index('id="figure-teacher-dynamics"') :]
    part = part[: part.index("</figure>")]
    assert 'Correct-branch KL: above, under <a href="#figure-teacher-mechanism">' in part
    assert part.count("<svg") == 2
    alone = figures.figures([run for run in runs if run.folder.name == "past-17"])
    assert "learning-curves" not in {figure.name for figure in alone}  # one method's change is its score, moved


def test_macro_stands_beside_the_name_and_spans_do_not_magnify(runs: list[Run]) -> None:
    scores = _bare(runs).partition('class="scores"')[2].partition("</table>")[0]
    header = re.findall(r'<th scope="col">(.*?)</th>', scores)
    assert header[:3] == ["Method", "Macro Avg@4", "95 % interval"]
    alone = _bare(runs[:1]).partition('class="scores"')[2].partition("</table>")[0]
    assert re.findall(r'<th scope="col">(.*?)</th>', alone)[:2] == ["Updates", "Macro Avg@4"]
    rows = summary.scores(data.methods(runs))
    close = [replace(row, macro=0.5 + 0.007 * i, interval=None) for i, row in enumerate(rows[:2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "scores", lambda _: close)
        marks = [float(x) for x in re.findall(r'class="dot" d="M([\d.]+) ', _bare(runs))]
    assert abs(marks[1] - marks[0]) == pytest.approx(7.0, abs=0.2)


def test_the_note_says_what_the_intervals_resample(runs: list[Run]) -> None:
    assert "Intervals resample the k draws of every problem" in Document(_bare(runs)).words
    single = replace(runs[0], evaluations={0: _evaluation(3, 1), 2: _evaluation(3, 1)})
    assert "Intervals resample the problems" in Document(_bare([single])).words
    nothing = replace(runs[0], evaluations={2: _evaluation(1, 1)})
    assert "Intervals" not in Document(_bare([nothing])).words


def test_every_class_of_answer_on_the_page_is_explained(html: str, runs: list[Run]) -> None:
    words = Document(html.partition('id="answers"')[2].partition("</section>")[0]).words
    found = {r for run in runs for t in run.evaluations[2].tasks.values() for r in t.reasons}
    assert "correct" in found
    for reason in found:
        assert f"{reason.replace('_', ' ')} {answers.REASONS[reason]}" in words
    browser = {"unit": 1, "limits": {}, "vocabulary": [], "runs": [{"method": "m", "seed": 1, "note": ""}]}
    shown = [{"correct": False, "reason": r, "continuations": []} for r in ("no_box", EVIL)]
    text = _bare(runs, browser | {"trajectories": shown})
    legend = text.partition('class="meanings"')[2].partition("</dl>")[0]
    assert escape(answers.REASONS["no_box"]) in legend
    assert escape(answers.UNKNOWN) in legend
    assert "<script" not in legend


def test_scores_are_those_of_the_bootstrap(html: str, runs: list[Run]) -> None:
    by_name = {m.recipe.method.name: m for m in data.methods(runs)}
    last = {name: stack([run.evaluations[2] for run in m.runs.values()]) for name, m in by_name.items()}
    own = {name: stats.bootstrap(outcomes) for name, outcomes in last.items()}
    gain = stats.paired_bootstrap(last["past"], last["opsd"])
    rows = {row.label: row for row in summary.scores(data.methods(runs))}
    assert list(rows) == ["Base model", "Vanilla OPSD", "PAST"]
    assert rows["PAST"].interval == own["past"]
    assert rows["PAST"].macro == pytest.approx(own["past"].estimate)
    assert rows["Vanilla OPSD"].interval == own["opsd"]
    assert rows["PAST"].difference == gain
    assert rows["PAST"].against == "Vanilla OPSD"
    assert rows["Vanilla OPSD"].difference is rows["Base model"].difference is None
    assert (rows["Base model"].step, rows["PAST"].step, rows["PAST"].seeds) == (0, 2, "17, 29")
    words = Document(html).words
    assert f"{100 * own['past'].estimate:.1f} % macro Avg@4 after 2 cycles" in words
    assert f"95 % interval {100 * own['past'].low:.1f} to {100 * own['past'].high:.1f}" in words
    signed = [f"{100 * v:+.1f}".replace("-", "−") for v in (gain.estimate, gain.low, gain.high)]
    assert "{} [{}, {}] against Vanilla OPSD".format(*signed) in words


def test_one_run_is_set_against_its_own_start(runs: list[Run]) -> None:
    run = next(r for r in runs if r.recipe.method.name == "past")
    first, last = summary.scores(data.methods([run]))
    before, after = (stack([run.evaluations[step]]) for step in (0, 2))
    assert (first.step, first.difference, last.step) == (0, None, 2)
    assert last.difference == stats.paired_bootstrap(after, before)
    words = Document(_bare([run])).words
    assert "Before training" in words
    assert "After 2 cycles" in words
    assert "seed 17 ·" in words
    assert "What differs" not in words


def _evaluation(problems: int, samples: int) -> Evaluation:
    outcomes = [[(i + j) % 2 for j in range(samples)] for i in range(problems)]
    answers = [["1"] * samples for _ in range(problems)]
    task = TaskResult([f"p{i}" for i in range(problems)], outcomes, answers, {}, {}, 3.0, 0.0)
    return Evaluation(2, "student", samples, 0, {"set": task})


@pytest.mark.parametrize(("problems", "samples", "unit"), [(3, 2, "sample"), (3, 1, "problem"), (1, 1, None)])
def test_intervals_resample_what_there_is(problems: int, samples: int, unit: str | None, runs: list[Run]) -> None:
    run = replace(runs[0], evaluations={0: _evaluation(problems, samples), 2: _evaluation(problems, samples)})
    row = summary.scores(data.methods([run]))[-1]
    assert (row.interval and row.interval.unit) == unit
    assert (row.difference and row.difference.unit) == unit
    assert "macro Avg@" in Document(_bare([run])).words


def test_what_was_not_evaluated_alike_is_not_paired(runs: list[Run]) -> None:
    other = [replace(r, evaluations={2: _evaluation(3, 2)}) if r.recipe.method.name == "past" else r for r in runs]
    row = summary.scores(data.methods(other))[-1]
    assert (row.label, row.difference) == ("PAST", None)
    assert row.interval is not None
    odd = [replace(r, evaluations={}) for r in runs]
    assert summary.scores(data.methods(odd)) == []
    assert "No evaluation has been written yet" in _bare(odd)


def test_what_differs_between_recipes_comes_first(runs: list[Run]) -> None:
    found = summary.differences(data.methods(runs))
    assert found["run.seed"] == ["17, 29", "17, 29"]
    assert found["method.name"] == ["opsd", "past"]
    assert found["method.beta_kl"] == ["", "0.05"]
    assert "run.cycles" not in found
    whole = [all(values) for values in found.values()]
    assert whole == sorted(whole, reverse=True)
    text = _bare(runs)
    assert text.index("What differs") < text.index('class="toml"')
    assert '<span class="h">[rollout]</span>\n' in text


def test_progress_is_told(runs: list[Run]) -> None:
    assert "2 cycles, ended 20" in Document(_bare(runs[:1])).words
    half = replace(runs[0], completed=1)
    assert "cycle 1 of 2" in Document(_bare([half])).words
    assert "1 of 4 runs unfinished (one at cycle 1 of 2)" in Document(_bare([half, *runs[1:]])).words


def test_warnings_are_prominent_and_their_absence_is_green(runs: list[Run]) -> None:
    well = [replace(r, warnings=[]) for r in runs]
    text = _bare(well)
    assert '<p class="healthy">No health warnings.' in text
    assert 'class="warned"' not in text.partition("<main>")[0]
    ill = [replace(well[0], warnings=[f"mean length fell {EVIL}", "second"]), *well[1:]]
    words = Document(_bare(ill)).words
    assert "2 health warnings in 1 of 4 runs. mean length fell </script>" in words
    assert "second" in words
    assert 'class="healthy"' not in _bare(ill)


@pytest.mark.parametrize("text", [EVIL, "<!--<script>", "\ud800 lone", "]]>", "plain"], ids=range(5))
def test_embedded_data_cannot_leave_its_element(text: str) -> None:
    embedded = page.embed({text: [text]})
    assert not set(embedded) & set("<>&\u2028\u2029")
    embedded.encode()
    assert json.loads(embedded) == {text: [text]}


def test_what_recipes_data_and_models_wrote_is_text(runs: list[Run]) -> None:
    recipe = runs[0].recipe.model_copy(update={"name": EVIL, "description": EVIL})
    evil = replace(runs[0], recipe=recipe, warnings=[EVIL], folder=Path(f"/tmp/{EVIL}"))
    note = {"runs": [{"method": EVIL, "note": EVIL}], "trajectories": [], "unit": 1, "vocabulary": [EVIL]}
    document = Document(_bare([evil], note))
    assert document.stack == []
    assert document.tags.count("script") == 2
    assert "img" not in document.tags
    assert EVIL.split("\u2028")[0] in document.words
    table = page.TEMPLATES.get_template("macros.html").module.table(["<i>"], [["<b>", 1234]])  # pyright: ignore
    assert '<th scope="col">&lt;i&gt;</th>' in table
    assert "<td>&lt;b&gt;</td>" in table
    assert '<td class="num">1,234</td>' in table


@pytest.mark.parametrize("count", [0, 2])
def test_a_missing_browser_says_why(count: int, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "past-17", tmp_path / "run")
    for path in (copy / "checkpoints").glob("*/adapter_model.safetensors"):
        path.write_bytes(b"x")
    found = data.find([copy])
    text = Document(_bare(found, trajectories.collect(data.methods(found), count))).words
    if count:
        assert "The trajectory browser is not available." in text
        assert "checkpoint-00000 is damaged: adapter_model.safetensors differs from what was written" in text
    else:
        assert "Left out: the report was written with --trajectories 0." in text


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.report(parser)
    return parser.parse_args(words)


def test_the_command_writes_beside_the_one_folder_given(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "opsd-17"
    drawn = _first_panels(data.find([run]))[:2]
    monkeypatch.setattr(report.figures, "figures", lambda runs: drawn)  # two of them are enough here
    assert commands.report(_arguments(str(run), "--trajectories", "2", "--figures")) == 0
    out = run / "report" / "index.html"
    assert f"{out}: " in capsys.readouterr().out
    document = Document(out.read_text(encoding="utf-8"))
    files = [r for r in document.references if r.startswith("figures/")]
    assert len(files) == 2 * len(drawn)
    assert all((out.parent / name).stat().st_size > 500 for name in files)
    assert {Path(name).suffix for name in files} == {".svg", ".pdf"}
    assert sorted(p.name for p in out.parent.iterdir()) == ["figures", "index.html"]
    shutil.rmtree(out.parent)


def test_a_failed_report_leaves_the_old_one(runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("full")

    out = tmp_path / "index.html"
    out.write_text("old")
    monkeypatch.setattr(report.figures, "figures", lambda runs: [])  # drawing them is tested above
    report.write(runs, out, trajectories=0, figures=False)
    whole = out.read_text(encoding="utf-8")
    assert whole.startswith("<!doctype html>")
    assert whole.endswith("</html>\n")
    monkeypatch.setattr("past_opsd.core.files.os.replace", full)
    with pytest.raises(PastError, match="full"):
        report.write(runs, out, trajectories=0, figures=False)
    assert [p.name for p in tmp_path.iterdir()] == ["index.html"]
    assert out.read_text(encoding="utf-8") == whole


def test_mistakes_are_one_message(folder: Path, tmp_path: Path) -> None:
    one, two = str(folder / "past-17"), str(folder / "opsd-17")
    for words, message in [
        ((one, two), "--out FILE.html"),
        ((one, "--trajectories", "-1"), "trajectories = -1"),
        ((one, "--out", str(tmp_path)), "is a folder"),
        ((str(tmp_path / "nothing"),), "no such folder"),
    ]:
        with pytest.raises(PastError, match=message):
            commands.report(_arguments(*words))
