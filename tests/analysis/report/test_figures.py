from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import Quiet, small

from past_opsd.analysis.report import answers, data, figures, learning, page, panels, points, style
from past_opsd.analysis.report.figures import Figure, Panel
from past_opsd.core.nouns import PastError
from past_opsd.interface import arguments, commands
from past_opsd.rollout.verifiers import Reason
from past_opsd.run.train import train

PAPER = {
    "fig:main-learning-dynamics",
    "fig:learning-curves",
    "fig:teacher-mechanism",
    "fig:teacher-dynamics",
    "fig:objective-tradeoffs",
    "fig:adaptive-sampling",
    "fig:privilege-dynamics",
    "fig:past-intro",
    "fig:past-method",
}

pytestmark = pytest.mark.slow  # five runs and every figure of them


def command(name: str, *words: str) -> None:
    parser = argparse.ArgumentParser()
    getattr(arguments, name)(parser)
    assert getattr(commands, name)(parser.parse_args(list(words))) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PAST with two seeds, one of them probed, and three methods that record less."""
    root = tmp_path_factory.mktemp("figures")
    for name, seed in (("past", 17), ("past", 29), ("opsd", 17), ("grpo", 17), ("sft", 17)):
        cut = ("run.cycles=3", "evaluation.at=[0.0, 1.0]", "rollout.problems_per_cycle=4", f"run.seed={seed}")
        train(small(f"embedded/{name}", *cut), root / f"{name}-{seed}", False, Quiet())
    run = str(root / "past-17")
    command("probe", run, "--problems", "4", "--samples", "1", "--json")
    for step in ("2", "3"):
        sizes = ("--responses", "8", "--pairs", "8", "--prefixes", "3", "--completions", "3")
        command("shift", run, "--step", step, *sizes, "--json")
    return root


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[data.Run]:
    return data.find([folder])


@pytest.fixture(scope="module")
def found(runs: list[data.Run]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures.figures(runs)}


@pytest.fixture(scope="module")
def drawn(found: dict[str, Figure]) -> dict[str, str]:
    return {panel.name: figures.svg(panel) for figure in found.values() for panel in figure.panels}


def only(runs: list[data.Run], *names: str) -> list[data.Run]:
    return [run for run in runs if run.folder.name in names]


def by_name(runs: list[data.Run]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures.figures(runs)}


def panel(figure: Figure, end: str) -> Panel:
    (one,) = [p for p in figure.panels if p.name.endswith(end)]
    return one


def column(of: Panel, start: str) -> list[str]:
    header, rows = of.table
    (index,) = [i for i, name in enumerate(header) if name.startswith(start)]
    return [row[index] for row in rows]


def test_full_records_give_every_figure_of_the_paper_in_report_order(found: dict[str, Figure]):
    assert {f.label for f in found.values()} >= PAPER
    order = [list(figures.SECTIONS).index(f.section) for f in found.values()]
    assert order == sorted(order)
    names = [p.name for f in found.values() for p in f.panels]
    assert len(names) == len(set(names))
    for figure in found.values():
        for p in figure.panels:
            header, rows = p.table
            assert rows, p.name
            assert all(len(row) == len(header) for row in rows), p.name


def test_learning_panels_show_the_evaluations(runs: list[data.Run], found: dict[str, Figure]):
    first, second = only(runs, "past-17", "past-29")
    macro = panel(found["main-learning-dynamics"], "-Macro")
    assert [p.title for p in found["main-learning-dynamics"].panels] == ["Macro", "chain3", "chain4", "chain5"]
    for step, cell in zip((0, 3), column(macro, "PAST"), strict=True):
        values = [100 * run.evaluations[step].summary([])["macro/avg@4"] for run in (first, second)]
        mean, low, high = sum(values) / 2, min(values), max(values)
        assert cell == (f"{mean:.1f} ({low:.1f} to {high:.1f})" if f"{low:.1f}" != f"{high:.1f}" else f"{mean:.1f}")
    changed = panel(found["learning-curves"], "-Macro")
    gains = [100 * (run.summaries[3]["macro/avg@4"] - run.summaries[0]["macro/avg@4"]) for run in (first, second)]
    assert column(changed, "PAST")[0] == "+0.0"
    assert column(changed, "PAST")[1].startswith(f"{sum(gains) / 2:+.1f}")


def test_trace_panels_show_the_metrics(runs: list[data.Run], found: dict[str, Figure]):
    run = only(runs, "past-17")[0]
    alone = by_name([run])
    expected = {line["cycle"]: line["teacher/grad_norm"] for line in run.metrics if "teacher/grad_norm" in line}
    shown = panel(alone["privilege-dynamics"], "teacher-grad-norm")
    assert dict(zip(column(shown, "cycle"), column(shown, "PAST"), strict=True)) == {
        str(k): f"{v:.4g}" for k, v in expected.items()
    }
    g_base = panel(alone["adaptive-sampling"], "-g-base")
    assert column(g_base, "PAST") == [f"{line['sampling/g_base']:.4g}" for line in run.metrics]


def test_bands_are_drawn_from_the_lowest_to_the_highest_seed():
    line = style.Line("x", style.Look(style.SERIES[0], "-", "o", 0), {1: {0: 0.2, 1: 0.4}, 2: {0: 0.3, 1: 0.8}})
    with panels._matplotlib("test"):
        ax = panels._canvas(4, 3).add_subplot()
        style.draw_lines(ax, [line], style.Quantity("y", "share", floor=None))
        (area,) = ax.collections
        corners = {(round(float(x), 6), round(float(y), 6)) for x, y in area.get_paths()[0].vertices}
        (drawn,) = ax.get_lines()
        assert corners == {(0.0, 20.0), (0.0, 30.0), (1.0, 40.0), (1.0, 80.0)}
        assert list(drawn.get_ydata()) == pytest.approx([25.0, 60.0])


def test_probe_panels_show_the_newest_record(runs: list[data.Run]):
    run = only(runs, "past-17")[0]
    value = run.probes[3]["conditions"]["removed"]["all"]["success"]
    probed = {1: run.probes[3] | {"step": 1}, 3: run.probes[3], 2: run.probes[3] | {"step": 2}}
    shown = panel(by_name([replace(run, probes=probed)])["teacher-mechanism"], "mechanism-success")
    assert shown.table[1][0][:3] == ["PAST", "17", "3"]
    cell = f"{100 * value['estimate']:.1f} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"
    assert column(shown, "removed") == [cell]


def test_the_decomposition_shows_the_shift_records(runs: list[data.Run], found: dict[str, Figure]):
    run = only(runs, "past-17")[0]
    shown = panel(found["privilege-decomposition"], "-parts")
    estimates = [run.shifts[step]["estimates"] for step in (2, 3)]
    assert column(shown, "stays") == [f"{e['privileged']['estimate']:.4g}" for e in estimates]
    assert column(shown, "reaches") == [f"{e['shift']['estimate']:.4g}" for e in estimates]
    value = panel(found["privilege-decomposition"], "-value")
    assert column(value, "low") == [f"{100 * e['value']['low']:+.1f}" for e in estimates]


def test_costs_and_trade_offs_are_those_of_compare(runs: list[data.Run], found: dict[str, Figure]):
    rows = {m.label: data.measured(m) for m in data.methods(runs)}
    accounting = panel(found["cost"], "-memory")
    assert column(accounting, "Method") == list(rows)
    assert column(accounting, "T. samples") == [f"{row.costs['teacher_samples']:,.0f}" for row in rows.values()]
    assert column(accounting, "Verifier") == [f"{row.costs['verifier_calls']:,.0f}" for row in rows.values()]
    speed = panel(found["objective-tradeoffs"], "-throughput")
    past = rows["PAST"].costs
    tokens = past["student_tokens"] + past["teacher_tokens"]
    assert dict(zip(column(speed, "Method"), column(speed, "Generated"), strict=True))["PAST"] == (
        f"{tokens / past['seconds']:.4g}"
    )
    assert "SFT" not in column(speed, "Method")  # it generates nothing


def test_the_cycle_names_the_runs_totals(runs: list[data.Run]):
    run = only(runs, "past-17")[0]
    rows = dict(by_name([run])["past-method"].panels[0].table[1])
    last = run.metrics[-1]
    assert rows["student responses"] == f"{last['cost/student_samples']:,}"
    assert rows["teacher continuations"] == f"{last['cost/teacher_samples']:,}"
    svg = figures.svg(by_name([run])["past-method"].panels[0])
    assert f"{last['cost/teacher_samples']:,} continuations" in svg


def test_methods_without_the_records_are_left_out(runs: list[data.Run], found: dict[str, Figure]):
    assert column(panel(found["teacher-dynamics"], "teacher-grad-norm"), "cycle") == ["0", "1", "2"]
    assert [h.split(" ")[0] for h in panel(found["teacher-dynamics"], "teacher-grad-norm").table[0]] == [
        "cycle",
        "PAST",
    ]
    plain = by_name(only(runs, "sft-17"))
    assert set(plain) == {"main-learning-dynamics", "cost", "health"}
    assert {p.name for p in plain["cost"].panels} == {"cost-seconds", "cost-memory"}
    two = by_name(only(runs, "opsd-17", "grpo-17"))
    assert {"teacher-mechanism", "adaptive-sampling", "past-method", "privilege-dynamics"}.isdisjoint(two)
    assert "kl-by-position" in two
    assert "-kl" not in {p.name.removeprefix("objective-tradeoffs") for p in two["objective-tradeoffs"].panels}


def test_without_a_probe_the_caption_says_how_to_make_one(runs: list[data.Run], found: dict[str, Figure]):
    bare = by_name(only(runs, "past-29"))
    assert "past probe RUN" in bare["teacher-mechanism"].caption
    assert "past probe RUN" not in found["teacher-mechanism"].caption
    assert {p.title for p in bare["teacher-mechanism"].panels} == {"Correct-branch KL", "Failed-branch success"}
    assert "privilege-decomposition" not in bare
    assert "objective-tradeoffs" not in bare  # one method is no trade-off
    assert "past shift RUN" in bare["privilege-dynamics"].caption


def test_a_run_that_has_just_begun_gives_no_figure_or_fewer(runs: list[data.Run]):
    run = only(runs, "past-17")[0]
    begun = replace(run, metrics=[], timings=[], evaluations={}, probes={}, shifts={}, completed=0)
    assert figures.figures([begun]) == []
    early = replace(begun, metrics=run.metrics[:1], timings=run.timings[:1], completed=1)
    made = figures.figures([early])
    assert {"teacher-dynamics", "cost", "past-method"} <= {figure.name for figure in made}
    for figure in made:
        figures.svg(figure.panels[0])


@pytest.mark.slow
def test_svg_takes_every_colour_from_the_page(drawn: dict[str, str]):
    for name, text in drawn.items():
        bare = re.sub(rf"var\(--({'|'.join(style.THEME.values())}), #[0-9a-f]{{6}}\)", "", text)
        assert not re.search(r"#[0-9a-fA-F]{3,8}\b(?![-\w\")])", bare), name
        assert not re.search(r"(fill|stroke|color)(: |=\")(?!none)[#a-z]", bare), name
        assert not re.search(r"\b(rgb|hsl)a?\(", bare), name
    text = "".join(drawn.values())
    assert all(f"var(--{variable}, " in text for variable in ("fg", "grid", "c0", "c1", "c2", "c3"))


def test_svg_is_self_contained_and_scales(drawn: dict[str, str]):
    for name, text in drawn.items():
        root = ElementTree.fromstring(text)
        assert text.startswith("<svg ")
        assert root.get("viewBox")
        assert (root.get("width"), root.get("height")) == ("100%", None)
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"') == 1, name
        for word in ("xlink", "<style", "<script", "<image", "<metadata", "<!", "@import", "data:"):
            assert word not in text, (name, word)
        assert not re.search(r"url\((?!#)|href=\"(?!#)", text), name
        assert root.find(".//{*}text") is not None, name


def test_svg_ids_are_unique_in_the_whole_page_and_all_references_resolve(drawn: dict[str, str]):
    ids = [i for text in drawn.values() for i in re.findall(r' id="([^"]+)"', text)]
    assert len(ids) == len(set(ids)) > 0
    for name, text in drawn.items():
        own = set(re.findall(r' id="([^"]+)"', text))
        assert all(i.startswith(f"{name}-") for i in own)
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= own


def test_text_is_readable_on_a_phone(drawn: dict[str, str]):
    for name, text in drawn.items():
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]
        assert min(sizes) >= 9, name
        width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', text)[0])
        assert width == pytest.approx(4.2 * 72), name


def test_names_from_outside_cannot_break_the_svg(runs: list[data.Run]):
    evil = '"><script>x $\\frac{1}{$'
    run = only(runs, "opsd-17")[0]
    step, evaluation = max(run.evaluations.items())
    renamed = replace(evaluation, tasks={evil: evaluation.tasks["chain3"], "問題": evaluation.tasks["chain4"]})
    recipe = run.recipe.model_copy(update={"name": evil})
    made = by_name([replace(run, recipe=recipe, evaluations={step: renamed}), *only(runs, "past-17")])
    texts = [figures.svg(p) for p in made["main-learning-dynamics"].panels]
    for text in texts:
        ElementTree.fromstring(text)
        assert "<script" not in text
    assert "&gt;&lt;script&gt;x $\\frac{1}{$" in texts[-1]  # in the legend, as written


def test_a_method_has_one_colour_in_all_panels(runs: list[data.Run]):
    looks = style.looks(data.methods(runs))
    assert looks["embedded/past"].colour == style.SERIES[0]
    assert len({(look.colour, look.dash) for look in looks.values()}) == len(looks) == 4
    for figure in figures.figures(runs):
        for p in figure.panels:
            with panels._matplotlib("test"):
                for ax in panels.draw(p)[0].axes:
                    for line in ax.get_lines():
                        if line.get_label() == "PAST":
                            assert line.get_color() == style.SERIES[0], p.name


def test_many_methods_stay_distinct_and_no_colour_is_given_twice(runs: list[data.Run]):
    run = only(runs, "past-29")[0]
    many = [replace(run, recipe=run.recipe.model_copy(update={"name": f"m{i:02d}"})) for i in range(20)]
    looks = style.looks(data.methods(many))
    first = list(looks.values())[: style.MOST_LINES]
    assert len({(look.colour, str(look.dash)) for look in first}) == style.MOST_LINES == 12
    assert len({(look.colour, look.marker) for look in looks.values()}) == 20
    assert [look.colour for look in looks.values()] == [*style.SERIES, *[style.OTHER] * (20 - len(style.SERIES))]
    made = by_name(many)
    macro = panel(made["main-learning-dynamics"], "-Macro")
    assert len(macro.table[0]) == 21
    with panels._matplotlib("test"):
        ax = panels.draw(macro)[0].axes[0]
        assert ax.get_legend_handles_labels()[1] == [f"m{i:02d}" for i in range(12)]
    assert "grey" in macro.note
    figures.svg(panel(made["objective-tradeoffs"], "-kl"))


def test_the_legend_names_the_points_of_a_trade_off():
    look = style.Look(style.SERIES[0], "-", "o", 0)
    many = [points.Point(f"method number {i}", look, 1.0 + 0.02 * (i % 3), 50.0 + 0.5 * i) for i in range(6)]
    made = panels.Panel("test", "test", partial(points.draw_points, points=many, x="x", y="y"), ([], []))
    with panels._matplotlib("test"):
        canvas, spots = panels.draw(made)
        (legend,) = canvas.legends
    assert [text.get_text() for text in legend.get_texts()] == [spot.title for spot in spots] == [p.label for p in many]
    assert not canvas.axes[0].texts  # nothing that could cover a point


@pytest.mark.slow
def test_svg_and_pdf_are_the_same_bytes_in_another_process(folder: Path, found: dict[str, Figure], tmp_path: Path):
    here = {p.name: p.read_bytes() for p in figures.save(found["adaptive-sampling"], tmp_path / "here")}
    inline = figures.svg(found["adaptive-sampling"].panels[0])
    script = f"""
from pathlib import Path
from past_opsd.analysis.report import data, figures
found = [f for f in figures.figures(data.find([{str(folder)!r}])) if f.name == "adaptive-sampling"]
figures.save(found[0], Path({str(tmp_path / "there")!r}))
Path({str(tmp_path / "inline.svg")!r}).write_text(figures.svg(found[0].panels[0]))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert sorted(here) == ["adaptive-sampling.pdf", "adaptive-sampling.svg"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "there").iterdir()} == here
    assert (tmp_path / "inline.svg").read_text() == inline
    assert here["adaptive-sampling.pdf"].startswith(b"%PDF")
    plain = here["adaptive-sampling.svg"].decode()
    assert "var(--" not in plain
    assert "(a) Base group size" in plain
    assert "<dc:date" not in plain


@pytest.mark.slow
def test_figures_of_every_shape_can_be_saved(found: dict[str, Figure], tmp_path: Path):
    for name in ("cost", "past-method", "objective-tradeoffs"):
        assert all(path.stat().st_size > 1000 for path in figures.save(found[name], tmp_path)), name


def test_the_users_matplotlib_settings_are_neither_used_nor_changed(found: dict[str, Figure]):
    import matplotlib

    one = found["cost"].panels[0]
    before = figures.svg(one)
    with matplotlib.rc_context({"font.size": 31, "xtick.major.size": 20, "text.usetex": True}):
        assert figures.svg(one) == before
        assert matplotlib.rcParams["font.size"] == 31


def test_without_matplotlib_the_message_names_the_extra(
    runs: list[data.Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = figures.figures(runs)
    with pytest.raises(PastError, match=re.escape("pip install matplotlib")):
        figures.svg(made[0].panels[0])
    with pytest.raises(PastError, match=re.escape("pip install matplotlib")):
        figures.save(made[0], tmp_path)


def _axes(shown: Panel):
    with panels._matplotlib("test"):
        canvas, spots = panels.draw(shown)
        canvas.draw_without_rendering()
    return canvas.axes[0], spots


def _curve(values: dict[int, float], quantity: style.Quantity, **options: object) -> Panel:
    line = style.Line("x", style.Look(style.SERIES[0], "-", "o", 0), {17: values})
    return learning.curve("p", "P", [line], quantity, **options)


@pytest.mark.parametrize(
    ("quantity", "values"),
    [
        (style.Quantity("Avg@4", "share", floor=None), (0.420, 0.427)),
        (style.Quantity("Avg@4", "share", floor=None), (0.993, 1.0)),
        (style.Quantity("Avg@4", "share", floor=None), (0.0, 0.007)),
        (style.Quantity("Truncated", "share"), (0.0, 0.007)),
        (style.Quantity("Change", "points"), (0.0, 0.007)),
        (style.Quantity("Length"), (25.0, 25.175)),
        (style.Quantity("KL", log=True), (0.01, 0.01007)),
    ],
)
def test_a_change_of_less_than_a_percent_does_not_fill_a_panel(quantity: style.Quantity, values: tuple[float, float]):
    ax, _ = _axes(_curve(dict(enumerate(values)), quantity))
    (low, high), (first, last) = ax.get_ylim(), (quantity.scale * v for v in values)
    part = math.log(last / first) / math.log(high / low) if quantity.log else (last - first) / (high - low)
    assert 0 < part < 0.1
    assert low <= first < last <= high
    if quantity.kind == "share":
        assert low >= 0
        assert high <= 100 or quantity.floor is not None


def test_axes_show_all_that_is_there():
    """A large change is not cut, nor an estimated share beyond its bounds; one cycle stands in the middle."""
    ax, _ = _axes(_curve({0: 0.1, 1: 0.9}, style.Quantity("Avg@4", "share", floor=None)))
    assert ax.get_ylim()[0] <= 10 < 90 <= ax.get_ylim()[1]
    ax, _ = _axes(_curve({0: -0.2, 1: 1.3}, style.Quantity("Part", "share", floor=None)))
    assert ax.get_ylim()[0] <= -20 < 130 <= ax.get_ylim()[1]
    ax, _ = _axes(_curve({3: 0.5}, style.Quantity("Avg@4", "share", floor=None)))
    assert ax.get_xlim() == (2.0, 4.0)


def test_points_that_differ_little_lie_close():
    look = style.Look(style.SERIES[0], "-", "o", 0)
    two = [points.Point("a", look, 1000.0, 50.0), points.Point("b", look, 1007.0, 50.7)]
    with panels._matplotlib("test"):
        ax = panels._canvas(4.2, 3.4).add_subplot()
        points.draw_points(ax, two, "x", "y")
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    assert left == 0
    assert 7.0 / (right - left) < 0.1
    assert 0.7 / (high - low) < 0.1


def test_the_threshold_is_in_view_where_the_caption_speaks_of_it(runs: list[data.Run], found: dict[str, Figure]):
    shown = panel(found["adaptive-sampling"], "-ema")
    level = 100 * only(runs, "past-17")[0].recipe.method.success_threshold
    assert f"Dashed: the threshold, {level:g} %." in shown.note
    ax, _ = _axes(shown)
    dashed = [line for line in ax.get_lines() if len(set(line.get_ydata())) == 1 and line.get_ydata()[0] == level]
    assert dashed
    assert ax.get_ylim()[0] < level < ax.get_ylim()[1]
    other = replace(only(runs, "past-17")[0], recipe=_threshold(only(runs, "past-17")[0], "m", 0.25))
    two = by_name([*only(runs, "past-17"), other])["adaptive-sampling"]
    assert "Dashed" not in panel(two, "-ema").note
    assert f"{level:g} % (PAST), 25 % (m)" in two.caption


def _threshold(run: data.Run, name: str, value: float):
    method = run.recipe.method.model_copy(update={"success_threshold": value})
    return run.recipe.model_copy(update={"name": name, "method": method})


def test_notes_speak_of_the_ranges_that_are_drawn(runs: list[data.Run], found: dict[str, Figure]):
    macro = panel(found["main-learning-dynamics"], "-Macro")
    assert "means over 1 to 2 seeds, bands are their ranges" in macro.note.lower()
    alone = panel(by_name(only(runs, "past-17"))["main-learning-dynamics"], "-Macro")
    assert "seeds" not in alone.note
    assert "bands" not in alone.note
    many = [
        replace(run, recipe=run.recipe.model_copy(update={"name": f"m{i:02d}"}))
        for i in range(6)
        for run in only(runs, "past-17", "past-29")
    ]
    crowd = panel(by_name(many)["main-learning-dynamics"], "-Macro")
    assert "thin bars are their ranges" in crowd.note
    assert not [c for c in _axes(crowd)[0].collections if type(c).__name__ == "FillBetweenPolyCollection"]
    assert "logarithmic" in found["kl-by-position"].panels[0].note


def test_a_cycle_with_one_branch_is_not_said_to_have_two(runs: list[data.Run]):
    run = only(runs, "past-17")[0]
    assert "two branches that adapt" in by_name([run])["past-method"].caption
    lines = [{k: v for k, v in line.items() if not k.startswith("teacher/correct/")} for line in run.metrics]
    assert "the failed branch, which adapts" in by_name([replace(run, metrics=lines)])["past-method"].caption


def _hues(shown: Panel) -> set[str]:
    text = re.sub(r'data-hover="[^"]*"', "", figures.svg(shown))
    return set(re.findall(r"var\(--(c\d|student[-a-z]*|teacher[-a-z]*|neutral[-a-z]*|good|bad|other),", text))


@pytest.mark.slow
def test_a_hue_means_a_method_and_nothing_else(runs: list[data.Run], found: dict[str, Figure], drawn: dict[str, str]):
    roles = {"privilege-decomposition-parts", "cost-seconds", "cost-tokens", "cost-samples", "past-method-cycle"}
    assert roles <= set(drawn)
    for figure in found.values():
        for shown in figure.panels:
            used = _hues(shown)
            assert used, shown.name
            by_method = {name for name in used if name[0] == "c" and name[1:].isdigit()} | (used & {"other"})
            assert by_method == (set() if shown.name in roles else used), shown.name
    looks = style.looks(data.methods(runs))
    verifier = panel(found["cost"], "-verifier")
    bars = {label: _role(colour) for label, colour, _ in (row for s in _axes(verifier)[1] for row in s.rows)}
    assert set(bars) == {"verifier calls"}
    titles = {spot.title: spot.rows[0][1] for spot in _axes(verifier)[1]}
    assert titles == {m.label: looks[m.name].colour for m in data.methods(runs)}


def _role(colour: str) -> str:
    return style.THEME[colour]


def test_one_role_has_one_colour_in_all_panels(found: dict[str, Figure]):
    seen: dict[str, set[str]] = {}
    for name in ("-tokens", "-samples"):
        for spot in _axes(panel(found["cost"], name))[1]:
            for label, colour, _ in spot.rows[:-1]:
                seen.setdefault(label, set()).add(_role(colour))
    assert seen == {"student": {"student"}, "teacher": {"teacher"}}
    phases = {label: _role(c) for s in _axes(panel(found["cost"], "-seconds"))[1] for label, c, _ in s.rows[:-1]}
    assert phases["rollout"].startswith("student")
    assert phases["distill"].startswith("student")
    assert phases["draw"].startswith("teacher")
    assert phases["adapt"].startswith("teacher")
    told = [role for role in phases.values() if role != "neutral-soft"]  # what is left of a cycle shares a colour
    assert len(set(told)) == len(told)


_LINEAR = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                    [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
_OKLAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                   [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip
# Simulated colour deficiencies (Machado, Oliveira and Fernandes 2009, severity 1), on linear light.
_SIGHTS = {
    "full": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def _light(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _distance(a: str, b: str, sight: str) -> float:
    """In OKLab, in hundredths."""
    seen = [np.clip(_SIGHTS[sight] @ _light(c), 0, 1) for c in (a, b)]
    left, right = (_OKLAB @ np.cbrt(_LINEAR @ c) for c in seen)
    return float(100 * np.linalg.norm(left - right))


def _contrast(a: str, b: str) -> float:
    low, high = sorted(float(_light(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart_by_every_eye_and_seen_on_the_page(theme: int):
    css = (page.ASSETS / "report.css").read_text()
    named = dict(re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}, #[0-9a-f]{6})\)", css))
    of = {name: pair.split(", ")[theme] for name, pair in named.items()}
    series = [of[f"c{i}"] for i in range(len(style.SERIES))]
    if theme == 0:
        drawn = {
            variable: colour for colour, variable in style.THEME.items() if variable not in ("fg", "grid", "surface")
        }
        assert drawn == {name: of[name] for name in drawn}
    for sight in _SIGHTS:
        least = min(_distance(a, b, sight) for i, a in enumerate(series) for b in series[:i])
        assert least > (10 if sight == "full" else 6), sight  # markers and dashes tell them apart as well
    others = [
        of[name] for name in ("student", "student-soft", "teacher", "teacher-soft", "good", "bad", "warn-line", "h6")
    ]
    assert min(_distance(a, b, "full") for a in series for b in others) > 6
    assert min(_contrast(colour, of["surface"]) for colour in (*series, of["other"])) > 3


def test_every_panel_tells_its_values_where_they_are_drawn(found: dict[str, Figure], drawn: dict[str, str]):
    for figure in found.values():
        for shown in figure.panels:
            root = ElementTree.fromstring(drawn[shown.name])
            hover = json.loads(root.get("data-hover"))
            width, height = map(float, root.get("viewBox").split()[2:])
            assert root.get("tabindex") == "0"
            assert hover["spots"], shown.name
            for kind, title, rows, places in hover["spots"]:
                assert title, shown.name
                assert len(places) == (len(rows) if kind == "column" else 2 if kind == "area" else 1), shown.name
                assert all(0 <= x <= width and 0 <= y <= height for x, y in places), shown.name
                assert all(value and 0 <= key < len(hover["keys"]) for key, value in rows), shown.name


def test_the_values_told_are_those_of_the_table(runs: list[data.Run], found: dict[str, Figure]):
    macro = panel(found["main-learning-dynamics"], "-Macro")
    told = {spot.title: {label: value for label, _, value in spot.rows} for spot in _axes(macro)[1]}
    header, rows = macro.table
    assert told == {
        f"cycles done {row[0]}": {
            name.removesuffix(" (%)"): f"{cell} %" for name, cell in zip(header[1:], row[1:], strict=True) if cell
        }
        for row in rows
    }
    ax, spots = _axes(macro)
    ends = {line.get_label(): (line.get_xdata()[-1], line.get_ydata()[-1]) for line in ax.get_lines()}
    assert {row[0]: place for row, place in zip(spots[-1].rows, spots[-1].places, strict=True)} == ends
    samples = {spot.title: spot.rows for spot in _axes(panel(found["cost"], "-samples"))[1]}
    cells = dict(
        zip(column(panel(found["cost"], "-samples"), "Method"), panel(found["cost"], "-samples").table[1], strict=True)
    )
    assert [value for *_, value in samples["PAST"]] == [f"{cell} samples" for cell in cells["PAST"][1:]]


def test_every_class_of_answer_is_explained(runs: list[data.Run], found: dict[str, Figure]):
    assert set(answers.REASONS) == {reason.value for reason in Reason}
    assert len(set(answers.REASONS.values())) == len(answers.REASONS)
    for one in [p for p in found["health"].panels if p.title.startswith("Style: ")]:
        assert answers.STYLES["embedded"][one.title.removeprefix("Style: ")] in one.note
    classes = answers.reasons(data.methods(runs))
    assert classes is not None
    assert classes.columns == [m.label for m in data.methods(runs)]
    assert [sum(column) for column in zip(*classes.rows.values(), strict=True)] == pytest.approx([1.0] * 4)
    past = data.methods(only(runs, "past-17"))
    alone = answers.reasons(past)
    assert alone is not None
    assert alone.columns == ["before training", "after 3"]
    last = only(runs, "past-17")[0].evaluations[3]
    right = sum(result.reasons.get("correct", 0) for result in last.tasks.values())
    total = sum(sum(result.reasons.values()) for result in last.tasks.values())
    assert alone.rows["correct"][1] == pytest.approx(right / total)
