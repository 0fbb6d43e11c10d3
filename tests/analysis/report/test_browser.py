"""The report in a real browser: from disk, with no network, on a desk and on a phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Quiet, small

from past_opsd.analysis import report
from past_opsd.analysis.report import data
from past_opsd.run.train import train

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

pytestmark = pytest.mark.slow

EVIL = '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"></script><svg onload=alert(1)>'
SIZES = {"desk": (1280, 800), "phone": (375, 812)}
NARROW = (390, 844)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no browser found: install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "run"
    settings = ("run.keep_checkpoints=9", "rollout.problems_per_cycle=8", "method.tau=0.05")
    train(small("embedded/past", *settings), folder, False, Quiet())
    return folder


@pytest.fixture(scope="module")
def html(run: Path) -> Path:
    return report.write(data.find([run]), run / "report" / "index.html", figures=False)


@dataclass
class Visit:
    """An open page and everything it did."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def embedded(self) -> dict[str, Any]:
        return json.loads(self.page.locator("#trajectory-data").text_content())

    @property
    def current(self) -> dict[str, Any]:
        chosen = self.page.locator('#list button[aria-current="true"]').get_attribute("data-id")
        return next(t for t in self.embedded["trajectories"] if t["id"] == chosen)

    def shown(self, name: str) -> str:
        place = self.page.locator(f'#card [data-field="{name}"]')
        place.wait_for()  # while the page scrolls to a token the card is not shown
        return place.inner_text()

    def tokens(self) -> Any:
        return self.page.locator("#detail > .tokens .tok")


@contextmanager
def visit(browser: Any, file: Path, size: str, fragment: str = "", **options: Any) -> Iterator[Visit]:
    """Opens a file; at the end nothing but the file was asked for and nothing complained."""
    width, height = SIZES.get(size, NARROW)
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    found = Visit(context.new_page())
    found.page.set_default_timeout(20_000)
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("console", lambda message: found.errors.append(message.text) if message.type == "error" else None)
    found.page.goto(file.as_uri() + fragment)
    yield found
    assert [u for u in found.requests if u.partition("#")[0] != file.as_uri() and not u.startswith("data:")] == []
    assert found.errors == []
    context.close()


def _fits(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("size", SIZES)
def test_every_figure_shows_and_nothing_overflows(size: str, chromium: Any, html: Path) -> None:
    with visit(chromium, html, size) as found:
        panels = found.page.locator(".panel svg")
        assert panels.count() >= 20
        width = SIZES[size][0]
        for box in panels.evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())"):
            assert box["width"] > 150
            assert box["height"] > 80
            assert box["left"] >= 0
            assert box["right"] <= width
        assert _fits(found.page)
        found.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert _fits(found.page)
        heights = found.page.locator("main > section").evaluate_all("all => all.map(e => e.offsetHeight)")
        assert len(heights) >= 8
        assert min(heights) > 60
        for link in found.page.locator(".toc a").evaluate_all("all => all.map(a => a.getAttribute('href'))"):
            assert found.page.locator(link).count() == 1


def _spots(page: Any, index: int) -> dict[str, Any]:
    return json.loads(page.locator(".panel svg").nth(index).get_attribute("data-hover"))


def _point(page: Any, index: int, place: list[float]) -> tuple[float, float]:
    """Where a place of a chart is on the screen."""
    return tuple(
        page.locator(".panel svg")
        .nth(index)
        .evaluate(
            "(e, [x, y]) => { const p = new DOMPoint(x, y).matrixTransform(e.getScreenCTM()); return [p.x, p.y]; }",
            place,
        )
    )


def _told(page: Any) -> str:
    return " ".join(page.locator("#tip").inner_text().split())


def test_every_chart_tells_its_values_under_the_pointer(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "desk") as found:
        page = found.page
        page.add_style_tag(content="html { scroll-behavior: auto !important }")
        kinds = set()
        for index in range(page.locator(".panel svg").count()):
            spots = _spots(page, index)
            page.locator(".panel svg").nth(index).scroll_into_view_if_needed()
            for kind, title, rows, places in (spots["spots"][0], spots["spots"][-1]):
                kinds.add(kind)
                x, y = (sum(p[i] for p in places) / len(places) for i in (0, 1))
                page.mouse.move(*_point(page, index, [x, y]))
                shown = _told(page)
                assert shown.startswith(" ".join(title.split()))
                for key, value in rows:
                    assert f"{spots['keys'][key][0]} {value}" in shown
                box = page.locator("#tip").bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 1280
        assert kinds >= {"column", "area"}
        page.mouse.move(2, 2)
        assert page.locator("#tip").is_hidden()
        assert page.locator(".found").count() == 0


def test_charts_tell_their_values_to_the_keyboard_and_to_a_finger(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "phone", has_touch=True) as found:
        page, chart = found.page, found.page.locator(".panel svg").first
        titles = [title for _, title, _, _ in _spots(page, 0)["spots"]]
        assert len(titles) > 1
        chart.focus()
        page.keyboard.press("End")
        assert _told(page).startswith(titles[-1])
        page.keyboard.press("ArrowLeft")
        assert _told(page).startswith(titles[-2])
        page.keyboard.press("Home")
        assert _told(page).startswith(titles[0])
        assert page.locator("#tip").get_attribute("role") == "status"
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        page.evaluate("document.activeElement.blur()")
        chart.scroll_into_view_if_needed()
        page.touchscreen.tap(*_point(page, 0, _spots(page, 0)["spots"][-1][3][0]))
        assert _told(page).startswith(titles[-1])
        assert _fits(page)
        page.touchscreen.tap(5, 5)
        assert page.locator("#tip").is_hidden()


def test_macro_is_in_view_on_a_phone_whatever_the_methods_are_called(
    chromium: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.figures, "figures", lambda runs: [])
    (one,) = data.find([run])
    names = ["short", "a-group/with_an_extremely_long_name_of_a_recipe/without_any_space_to_break_at"]
    runs = [replace(one, recipe=one.recipe.model_copy(update={"name": name})) for name in names]
    for part, name in ((runs, "two.html"), ([one], "one.html")):
        out = report.write(part, tmp_path / name, figures=False, trajectories=0)
        with visit(chromium, out, "narrow") as found:
            cells = found.page.locator(".scores th:nth-child(2), .scores td:nth-child(2)")
            assert "Macro" in cells.first.inner_text()
            for box in cells.evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())"):
                assert 0 <= box["left"] < box["right"] <= 390
            assert _fits(found.page)


def test_badges_say_what_their_class_means_and_filter_by_it(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "desk") as found:
        page, meanings = found.page, found.embedded["meanings"]
        failed = {t["reason"] for t in found.embedded["trajectories"] if not t["correct"]}
        assert failed | {"correct"} <= set(meanings)
        for badge in page.locator("#list .badge").all():
            assert badge.get_attribute("title") == meanings[badge.inner_text().removeprefix("✓ ").replace(" ", "_")]
        assert meanings[found.current["reason"]] in page.locator("#detail .facts").inner_text()
        assert set(page.locator(".meanings dt").all_inner_texts()) == {name.replace("_", " ") for name in meanings}
        offered = page.locator("#by-verdict option").evaluate_all("all => all.map(o => o.value)")
        assert offered[:3] == ["", "yes", "no"]
        if len(failed) > 1:
            page.select_option("#by-verdict", f"is:{min(failed)}")
            assert page.locator("#list button").count() == sum(
                not t["correct"] and t["reason"] == min(failed) for t in found.embedded["trajectories"]
            )


def test_the_strip_tells_its_tokens(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "desk") as found:
        found.page.locator("#detail .strip i").nth(2).hover(force=True)
        assert found.shown("position").startswith("token 3 of")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_can_be_switched(scheme: str, chromium: Any, html: Path) -> None:
    def brightness(page: Any) -> tuple[float, float]:
        """Of the page, and of a label in its first figure."""
        return tuple(
            page.evaluate(
                """() => [getComputedStyle(document.body).backgroundColor,
                          getComputedStyle(document.querySelector(".panel svg text")).fill]
                   .map(c => c.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 765)"""
            )
        )

    with visit(chromium, html, "desk", color_scheme=scheme) as found:
        first = brightness(found.page)
        found.page.click("#theme")
        second = brightness(found.page)
        found.page.click("#theme")
        assert brightness(found.page) == first
        light, dark = (first, second) if scheme == "light" else (second, first)
        assert light[0] > 0.9
        assert light[1] < 0.4
        assert dark[0] < 0.2
        assert dark[1] > 0.6


@pytest.mark.parametrize("size", SIZES)
def test_a_token_shows_its_numbers(size: str, chromium: Any, html: Path) -> None:
    with visit(chromium, html, size, has_touch=size == "phone") as found:
        page = found.page
        page.select_option("#by-verdict", "no")
        assert set(page.locator("#list .badge").all_inner_texts()) <= {"wrong", "no box", "truncated"}
        page.locator("#list button").nth(1).click()
        chosen = found.current
        assert chosen["correct"] is False
        assert found.tokens().count() == len(chosen["pieces"])
        worst = max(range(len(chosen["kl"])), key=lambda i: chosen["kl"][i])
        token = found.tokens().nth(worst)
        token.tap() if size == "phone" else token.hover()
        unit = found.embedded["unit"]

        def number(whole: int) -> str:
            return f"{whole / unit:.4f}" if whole else "< 0.0001"

        def share(whole: int) -> str:
            return f"{100 * whole / unit:.2f} %" if whole else "< 0.01 %"

        assert found.shown("position") == f"token {worst + 1} of {chosen['length']}"
        assert found.shown("token") == chosen["pieces"][worst].replace(" ", "␣")
        assert found.shown("kl") == number(chosen["kl"][worst])
        assert found.shown("student") == share(chosen["p"][worst])
        assert found.shown("teacher") == share(chosen["q"][worst])
        assert found.shown("entropy") == number(chosen["entropy"][worst])
        assert found.shown("teacher-entropy") == number(chosen["teacher_entropy"][worst])
        assert found.shown("clipped") == str(chosen["clipped"][worst])
        for who, key in (("student", "top"), ("teacher", "teacher_top")):
            entries = chosen[key][worst]
            listed = page.locator(f"#card .{who} li span:last-child").all_inner_texts()
            assert listed == [share(p) for p in entries[1::2]]
            named = page.locator(f"#card .{who} li span:first-child").all_inner_texts()
            assert named == [found.embedded["vocabulary"][i].replace(" ", "␣") for i in entries[::2]]
        box = page.locator("#card").bounding_box()
        width, height = SIZES[size]
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height + 1
        if size == "phone":
            assert box["width"] == width
            page.click("#card .close")
        else:
            page.keyboard.press("Escape")
        assert page.locator("#card").is_hidden()
        assert _fits(page)


def test_colours_grow_with_the_divergence(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "desk") as found:
        chosen = max(found.embedded["trajectories"], key=lambda t: sum(t["clipped"]))
        assert sum(chosen["clipped"]) > 0
        found.page.locator(f'#list [data-id="{chosen["id"]}"]').click()
        classes = found.tokens().evaluate_all("all => all.map(e => e.className)")
        steps = [0.001, 0.01, 0.03, 0.1, 0.3, 1, 3]
        levels = [sum(kl / found.embedded["unit"] >= s for s in steps) for kl in chosen["kl"]]
        assert [int(c.split()[1][1:]) for c in classes] == levels
        assert ["clip" in c for c in classes] == [n > 0 for n in chosen["clipped"]]
        assert max(levels) >= 2
        facts = found.page.locator("#detail .facts").inner_text()
        assert f"{chosen['mean_kl']:.4f}" in facts
        hit = sum(n > 0 for n in chosen["clipped"])
        assert f"{100 * hit / len(chosen['clipped']):.1f} % ({hit} of {len(chosen['clipped'])})" in facts


def test_filters_search_and_keys(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "desk") as found:
        page, everything = found.page, found.embedded["trajectories"]
        rows = page.locator("#list button")
        assert rows.count() == len(everything) == 12
        for value, correct in (("yes", True), ("no", False)):
            page.select_option("#by-verdict", value)
            assert rows.count() == sum(t["correct"] is correct for t in everything) > 0
        page.select_option("#by-verdict", "")
        page.select_option("#by-cycle", "2")
        assert rows.count() == sum(t["cycle"] == 2 for t in everything) > 0
        page.select_option("#by-cycle", "")
        page.fill("#search", everything[3]["text"].upper())
        assert everything[3]["id"] in rows.evaluate_all("all => all.map(b => b.dataset.id)")
        page.fill("#search", "no such thing")
        assert (rows.count(), page.locator("#count").inner_text()) == (0, "0 of 12 trajectories")
        page.keyboard.press("j")
        assert page.locator("#search").input_value() == "no such thingj"
        page.fill("#search", "")
        rows.first.click()
        for key, index in (("j", 1), ("j", 2), ("k", 1)):
            page.keyboard.press(key)
            assert found.current["id"] == everything[index]["id"]
        assert page.evaluate("location.hash") == f"#t-{everything[1]['id']}"
        found.tokens().first.click()
        for key, index in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", -1), ("Home", 0)):
            page.keyboard.press(key)
            place = index % len(everything[1]["pieces"])
            assert found.shown("position").startswith(f"token {place + 1} of")
            assert page.evaluate("document.activeElement.dataset.i") == str(place)
        assert page.evaluate("location.hash") == f"#t-{everything[1]['id']}.0"


def test_a_link_opens_its_trajectory_and_token(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "desk") as found:
        target = next(t for t in found.embedded["trajectories"] if t["cycle"] == 2)
    with visit(chromium, html, "desk", f"#t-{target['id']}.4") as found:
        assert found.current["id"] == target["id"]
        assert found.shown("position") == f"token 5 of {target['length']}"
        assert found.page.locator("#browser").is_visible()


def test_continuations_open_in_their_colours(chromium: Any, html: Path) -> None:
    with visit(chromium, html, "phone") as found:
        page = found.page
        drawn = found.current["continuations"]
        assert drawn
        strands = page.locator("#detail .strand")
        assert strands.count() == len(drawn)
        index = next(i for i, c in enumerate(drawn) if c["correct"])
        strands.nth(index).locator("summary").click()
        tokens = strands.nth(index).locator(".tok")
        assert tokens.count() == len(drawn[index]["pieces"])
        tokens.nth(3).click()
        kl = drawn[index]["kl"][3]
        assert found.shown("kl") == (f"{kl / found.embedded['unit']:.4f}" if kl else "< 0.0001")
        page.locator("#detail summary").first.click()
        assert page.get_by_text(found.current["solution"], exact=True).is_visible()


def _poison(run: Path) -> None:
    """Every response, verdict and answer of a run becomes a hostile text."""
    for path in run.glob("*/cycle-*.parquet"):
        table = pq.read_table(path)
        rows = [row | {"text": EVIL, "reason": EVIL, "answer": EVIL, "correct": False} for row in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def test_a_hostile_response_is_shown_as_text(
    chromium: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    _poison(copy)
    monkeypatch.setattr(report.figures, "figures", lambda runs: [])  # they show no response
    out = report.write(data.find([copy]), tmp_path / "evil.html", figures=False)
    with visit(chromium, out, "desk") as found:
        assert found.current["recorded"] == EVIL
        assert found.page.locator("#detail > div .recorded").inner_text() == EVIL
        assert EVIL in found.page.locator("#detail .facts").inner_text()
        found.page.locator("#detail .strand summary").first.click()
        assert found.page.locator("#detail .strand .recorded").inner_text() == EVIL
        found.page.wait_for_timeout(100)
        assert found.page.evaluate("window.hacked") is None
        assert found.page.locator("img").count() == 0
        assert _fits(found.page)


def test_the_policy_stops_what_would_leave_the_file(chromium: Any, html: Path) -> None:
    """The requests above are empty because nothing asks; here something asks and is refused."""
    with visit(chromium, html, "desk") as found:
        found.page.evaluate(
            """() => new Promise(done => {
                 addEventListener("securitypolicyviolation", e => { window.refused = e.effectiveDirective; done(); });
                 document.body.append(Object.assign(new Image(), { src: "https://example.com/x.png" }));
               })"""
        )
        assert found.page.evaluate("window.refused") == "img-src"
        found.errors.clear()
        found.requests[:] = [u for u in found.requests if "example.com" not in u]
