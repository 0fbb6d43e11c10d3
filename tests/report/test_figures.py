from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import Quiet, small

from past_opsd import probes, shift
from past_opsd.report import data, figures, panels, points, style
from past_opsd.report.figures import Figure, Panel
from past_opsd.train import train
from past_opsd.types import PastError

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


def command(module, *words: str) -> None:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert module.run(parser.parse_args(list(words))) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PAST with two seeds, one of them probed, and three methods that record less."""
    root = tmp_path_factory.mktemp("figures")
    for name, seed in (("past", 17), ("past", 29), ("opsd", 17), ("grpo", 17), ("sft", 17)):
        cut = ("run.cycles=3", "evaluation.at=[0.0, 1.0]", "rollout.problems_per_cycle=4", f"run.seed={seed}")
        train(small(f"embedded/{name}", *cut), root / f"{name}-{seed}", False, Quiet())
    run = str(root / "past-17")
    command(probes, run, "--problems", "4", "--samples", "1", "--json")
    for step in ("2", "3"):
        command(shift, run, "--step", step, "--prefixes", "3", "--completions", "3", "--rollouts", "2", "--json")
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
    order = [figures.SECTIONS.index(f.section) for f in found.values()]
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
    assert [p.title for p in found["main-learning-dynamics"].panels] == ["chain3", "chain4", "chain5", "Macro"]
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
    assert column(accounting, "teacher samples") == [f"{row.costs['teacher_samples']:,.0f}" for row in rows.values()]
    assert column(accounting, "verifier") == [f"{row.costs['verifier_calls']:,.0f}" for row in rows.values()]
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
    assert set(plain) == {"main-learning-dynamics", "learning-curves", "cost", "health"}
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


def test_svg_takes_every_colour_from_the_page(drawn: dict[str, str]):
    for name, text in drawn.items():
        bare = re.sub(r"var\(--(fg|grid|c[0-7]), #[0-9a-f]{6}\)", "", text)
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
                for ax in panels.draw(p).axes:
                    for line in ax.get_lines():
                        if line.get_label() == "PAST":
                            assert line.get_color() == style.SERIES[0], p.name


def test_many_methods_stay_distinct_and_the_first_nine_are_coloured(runs: list[data.Run]):
    run = only(runs, "past-29")[0]
    many = [replace(run, recipe=run.recipe.model_copy(update={"name": f"m{i:02d}"})) for i in range(20)]
    looks = style.looks(data.methods(many))
    assert len({(look.colour, str(look.dash)) for look in looks.values()}) == 20
    assert len({(look.colour, look.marker) for look in looks.values()}) == 20
    made = by_name(many)
    macro = panel(made["main-learning-dynamics"], "-Macro")
    assert len(macro.table[0]) == 21
    with panels._matplotlib("test"):
        ax = panels.draw(macro).axes[0]
        assert ax.get_legend_handles_labels()[1] == [f"m{i:02d}" for i in range(9)]
    assert "grey" in macro.note
    figures.svg(panel(made["objective-tradeoffs"], "-kl"))


def test_labels_in_a_trade_off_do_not_cover_each_other():
    look = style.Look(style.SERIES[0], "-", "o", 0)
    many = [points.Point(f"method number {i}", look, 1.0 + 0.02 * (i % 3), 50.0 + 0.5 * i) for i in range(6)]
    with panels._matplotlib("test"):
        canvas = panels._canvas(4.2, 3.4)
        ax = canvas.add_subplot()
        points.draw_points(ax, many, "x", "y")
        canvas.draw_without_rendering()
        boxes = [text.get_window_extent() for text in ax.texts]
    assert not [(i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes) if i < j and a.overlaps(b)]


def test_svg_and_pdf_are_the_same_bytes_in_another_process(folder: Path, found: dict[str, Figure], tmp_path: Path):
    here = {p.name: p.read_bytes() for p in figures.save(found["adaptive-sampling"], tmp_path / "here")}
    inline = figures.svg(found["adaptive-sampling"].panels[0])
    script = f"""
from pathlib import Path
from past_opsd.report import data, figures
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
