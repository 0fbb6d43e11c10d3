from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from conftest import Quiet

from past_opsd.analysis import watch
from past_opsd.analysis.report import data, page
from past_opsd.analysis.watch import LIVE_POLICY, Server, Watched, progress, serve
from past_opsd.core.nouns import PastError
from past_opsd.run.train import train


@contextmanager
def running(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(server: Server, path: str = "/") -> str:
    with urllib.request.urlopen(f"{server.url.rstrip('/')}{path}", timeout=60) as answer:
        return answer.read().decode()


def state(server: Server) -> dict[str, Any]:
    return json.loads(get(server, "/state"))


def request(server: Server, method: str = "GET", path: str = "/state", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_recipe) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(small_recipe("embedded/opsd", "evaluation.at=[0.0, 1.0]"), folder, False, Quiet())
    return folder


def early(finished: Path, folder: Path, cycles: int = 1) -> Path:
    """The run as it was after its first cycles."""
    part = folder.with_name(f".{folder.name}")
    shutil.copytree(finished, part, ignore=shutil.ignore_patterns("checkpoint-*", "step-00003.json"))
    for name in ("metrics.jsonl", "timings.jsonl"):
        lines = (part / name).read_text().splitlines(keepends=True)
        (part / name).write_text("".join(lines[:cycles]))
    part.rename(folder)
    return folder


def advance(finished: Path, folder: Path) -> None:
    """One more cycle is recorded."""
    for name in ("metrics.jsonl", "timings.jsonl"):
        done = len((folder / name).read_text().splitlines())
        with (folder / name).open("a") as file:
            file.write((finished / name).read_text().splitlines(keepends=True)[done])


class Gate(Quiet):
    """Holds a training at the start of each cycle until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = [threading.Event() for _ in range(3)]
        self.let_on = [threading.Event() for _ in range(3)]

    def phase(self, cycle: int, name: str) -> None:
        if name == "rollout":
            self.reached[cycle].set()
            assert self.let_on[cycle].wait(120)


@pytest.mark.slow
def test_a_training_is_followed_from_before_its_start_to_its_end(tmp_path: Path, small_recipe):
    folder = tmp_path / "runs" / "run"
    gate = Gate()
    recipe = small_recipe("embedded/past", "evaluation.at=[0.0]")
    training = threading.Thread(target=lambda: train(recipe, folder, False, gate))
    with running(serve([folder])) as server:
        first = state(server)
        assert (first["ready"], first["finished"]) == (False, False)
        assert "Waiting for the first cycle" in get(server)
        training.start()
        seen = []
        for k in range(3):
            assert gate.reached[k].wait(120)
            found = state(server)
            seen.append((found["ready"], found["text"], found["finished"], found["problem"]))
            if k:
                assert f"cycle {k} of 3" in get(server)
                assert state(server)["problem"] == ""
                assert state(server)["version"] in get(server)
            gate.let_on[k].set()
        training.join()
        assert seen == [
            (False, "waiting for the first cycle", False, ""),
            (True, "cycle 1/3", False, ""),
            (True, "cycle 2/3", False, ""),
        ]
        last = state(server)
        assert (last["text"], last["finished"]) == ("cycle 3/3", True)
        assert last["age"] < 60
        assert "3 cycles, ended" in get(server)


@pytest.mark.slow
def test_the_page_may_ask_its_server_and_nothing_else(finished: Path):
    with running(serve([finished])) as server, urllib.request.urlopen(server.url, timeout=60) as answer:
        html, headers = answer.read().decode(), dict(answer.headers)
    assert html.count("http-equiv") == 1
    assert f'content="{LIVE_POLICY}"' in html
    assert LIVE_POLICY == page.POLICY + "; connect-src 'self'"
    assert headers["Content-Security-Policy"].startswith(LIVE_POLICY)
    assert headers["Cache-Control"] == "no-store"
    assert html.rstrip().endswith("</script></body></html>")


def test_a_report_is_rendered_once_for_a_version(finished: Path, tmp_path: Path):
    folder = early(finished, tmp_path / "run")
    rendered = []

    def render(found):
        rendered.append(list(found))
        return f"<meta {page.POLICY}><head></head><body>report {len(rendered)}</body>"

    with running(Server("127.0.0.1", 0, Watched([folder], render), 5.0)) as server:
        assert "report 1" in get(server)
        assert "report 1" in get(server)
        before = state(server)["version"]
        advance(finished, folder)
        assert state(server)["version"] != before
        assert "report 2" in get(server)
        (folder / "probes").mkdir()
        (folder / "probes" / "step-00001.json").write_text("{}")
        assert "report 3" in get(server)
        (folder / "checkpoints" / "checkpoint-00003").mkdir()
        assert "report 4" in get(server)
    assert rendered == [[folder.resolve()]] * 4


def test_a_slow_report_does_not_hold_up_the_state(finished: Path):
    started, go = threading.Event(), threading.Event()

    def render(found):
        started.set()
        assert go.wait(60)
        return f"<meta {page.POLICY}><head></head><body>slow</body>"

    with running(Server("127.0.0.1", 0, Watched([finished], render), 5.0)) as server:
        pages: list[str] = []
        readers = [threading.Thread(target=lambda: pages.append(get(server))) for _ in range(2)]
        for reader in readers:
            reader.start()
        assert started.wait(60)
        assert state(server)["text"] == "cycle 3/3"
        assert pages == []
        go.set()
        for reader in readers:
            reader.join()
    assert ["slow" in text for text in pages] == [True, True]


@pytest.mark.slow
def test_half_written_files_do_not_break_it(finished: Path, tmp_path: Path):
    folder = early(finished, tmp_path / "run", cycles=2)
    with running(serve([folder])) as server:
        whole = state(server)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"cycle": 2, "rollout/succ')
        assert (state(server)["text"], state(server)["version"] == whole["version"]) == ("cycle 2/3", False)
        assert "cycle 2 of 3" in get(server)
        assert state(server)["problem"] == ""

        evaluation = folder / "evaluations" / "step-00003.json"
        evaluation.write_text('{"step": 3,')
        assert "cycle 2 of 3" in get(server)  # the last good report
        assert "step-00003.json: not an evaluation" in state(server)["problem"]
        evaluation.unlink()
        assert "cycle 2 of 3" in get(server)
        assert state(server)["problem"] == ""

        (folder / "recipe.toml").write_text("[run]\ncycles =")
        assert state(server)["ready"] is False
        assert "Waiting for the first cycle" in get(server)


def test_a_damaged_run_is_told_even_without_a_good_report(finished: Path, tmp_path: Path):
    folder = early(finished, tmp_path / "run")
    (folder / "evaluations" / "step-00003.json").write_text("<b>")
    with running(serve([folder])) as server:
        html = get(server)
    assert "not an evaluation written by this package" in html
    assert "<b>" not in html


@pytest.mark.slow
def test_several_runs_and_those_that_come_later(finished: Path, tmp_path: Path):
    with running(serve([tmp_path])) as server:
        assert state(server)["ready"] is False
        early(finished, tmp_path / "runs" / "a")
        assert state(server)["text"] == "cycle 1/3"
        shutil.copytree(finished, tmp_path / "runs" / "b")
        (tmp_path / "runs" / "c").mkdir()
        (tmp_path / "runs" / "c" / "recipe.toml").write_text((finished / "recipe.toml").read_text())
        assert state(server)["text"] == "3 runs, 1 finished, cycle 4/9"
        assert state(server)["finished"] is False
        assert "Runs (2)" in get(server)  # without the one that has nothing to show


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST:{port}", 200),
        ("[::1]:{port}", 200),
        ("127.0.0.1", 403),
        ("127.0.0.1:1", 403),
        ("evil.example:{port}", 403),
        ("127.0.0.1.evil.example:{port}", 403),
        ("127.0.0.1@evil.example:{port}", 403),
        ("192.168.0.7:{port}", 403),
        ("localhost:port", 403),
        ("", 403),
        (None, 403),
    ],
    ids=str,
)
def test_another_name_for_this_server_is_refused(tmp_path: Path, host: str | None, status: int):
    with running(serve([tmp_path])) as server:
        given = host.format(port=server.server_port) if host is not None else None
        found, content = request(server, host=given)
    assert found == status
    assert (b"version" in content) == (status == 200)


def test_bound_to_every_address_it_answers_to_addresses_and_its_own_name(tmp_path: Path):
    with serve([tmp_path], host="0.0.0.0") as server:
        port = server.server_port
        assert server.url == f"http://localhost:{port}/"
        assert server.owns(f"192.168.0.7:{port}")
        assert server.owns(f"{socket.gethostname()}:{port}")
        assert not server.owns(f"evil.example:{port}")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/state?x=1", 200),
        ("HEAD", "/", 200),
        ("HEAD", "/state", 200),
        ("GET", "/recipe.toml", 404),
        ("GET", "/../run/recipe.toml", 404),
        ("POST", "/state", 501),
        ("DELETE", "/", 501),
    ],
)
def test_only_two_pages_and_only_reading(tmp_path: Path, method: str, path: str, status: int):
    with running(serve([tmp_path])) as server:
        found, content = request(server, method, path, f"localhost:{server.server_port}")
    assert found == status
    assert bool(content) == (method != "HEAD")


def test_a_missing_package_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(PastError, match="pip install matplotlib"):
        serve([tmp_path])


def test_mistakes_are_told(finished: Path, tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "run"):
        with pytest.raises(PastError, match=f"{file} is a file; give a run folder"):
            serve([path])
    with serve([finished]) as server, pytest.raises(PastError, match=f"port {server.server_port} .*choose another"):
        serve([finished], port=server.server_port)
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 99999)):
        with pytest.raises(PastError, match=f"cannot listen on {host}, port {port} "):
            serve([finished], host=host, port=port)


def test_progress_of_a_folder_without_recipe(tmp_path: Path):
    assert progress(tmp_path) is None


# A process started in the background of a shell ignores Ctrl-C; this one must not.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from past_opsd.interface.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_command_prints_its_address_and_ends_with_ctrl_c(finished: Path, capfd: pytest.CaptureFixture[str]):
    from past_opsd.interface.cli import main

    assert main(["watch", str(finished), "--every", "0"]) == 2
    assert "--every 0.0: give 0.1 seconds or more" in capfd.readouterr().err
    assert main(["watch", str(finished), "--every", "inf"]) == 2
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "watch", str(finished)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("http://127.0.0.1:")
            assert line.endswith("/ (Ctrl-C ends)\n")
            with urllib.request.urlopen(line.split()[0] + "state", timeout=60) as answer:
                assert json.load(answer)["finished"]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no browser found: install chromium")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait(condition: Callable[[], bool], shown: Any) -> None:
    for _ in range(300):
        if condition():
            return
        shown.wait_for_timeout(100)
    raise AssertionError(f"the page did not follow: {shown.locator('body').inner_text()}")


def settled(expression: str, shown: Any) -> float:
    """A number of the page, once no scrolling or layout moves it any more."""
    seen = [shown.evaluate(expression)]
    wait(lambda: seen.append(shown.evaluate(expression)) or (len(seen) > 3 and len(set(seen[-4:])) == 1), shown)
    return seen[-1]


@pytest.mark.slow
def test_a_page_follows_its_run_by_itself_and_keeps_what_the_reader_did(finished: Path, tmp_path: Path, chromium: Any):
    folder = tmp_path / "run"
    with running(serve([folder], every=0.2)) as server:
        shown = chromium.new_page(viewport={"width": 900, "height": 600})
        problems: list[str] = []
        shown.on("pageerror", lambda error: problems.append(str(error)))
        shown.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        shown.goto(server.url)
        badge = shown.locator("#past-badge")
        wait(lambda: badge.inner_text() == "live: waiting for the first cycle", shown)
        assert shown.locator("h1").inner_text() == "Waiting for the first cycle"
        early(finished, folder)
        wait(lambda: "cycle 1 of 3" in shown.locator("body").inner_text(), shown)
        wait(lambda: badge.inner_text().startswith("live: cycle 1/3, updated "), shown)

        shown.evaluate("window.mark = 'the same document'")
        shown.click("#theme")
        theme = shown.evaluate("document.documentElement.dataset.theme")
        details = shown.locator("#summary details").first
        details.evaluate("e => { e.open = true; }")
        health = "document.querySelector('#health')"
        shown.evaluate("document.querySelector('#summary details summary').focus({ preventScroll: true })")
        # Something in the section above, which the next cycle's has not: what the reader looks at stays in its place.
        shown.evaluate("document.querySelector('#summary').append(document.createElement('hr'))")
        shown.evaluate(f"{health}.scrollIntoView({{ behavior: 'instant' }})")
        before = settled(f"{health}.getBoundingClientRect().top", shown)
        advance(finished, folder)
        wait(lambda: "cycle 2 of 3" in shown.locator("header.top").inner_text(), shown)
        assert "2 of 3" in details.inner_text()
        assert details.evaluate("e => e.open")
        assert shown.evaluate("document.documentElement.dataset.theme") == theme
        assert shown.evaluate("window.mark") == "the same document"
        assert settled(f"{health}.getBoundingClientRect().top", shown) == pytest.approx(before, abs=1)
        assert shown.evaluate("document.activeElement.tagName") == "SUMMARY"
        shown.click("#theme")
        assert shown.evaluate("document.documentElement.dataset.theme") != theme

        shutil.copytree(finished, folder, dirs_exist_ok=True)
        wait(lambda: badge.inner_text() == "finished: cycle 3/3", shown)
        wait(lambda: "ended" in shown.locator("header.top").inner_text(), shown)
        assert shown.evaluate("window.mark") == "the same document"
        assert problems == []
    wait(lambda: badge.inner_text() == "past watch has stopped", shown)
    shown.close()


def _write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda run: (run / name).write_text(text)


def _pipe(name: str) -> Callable[[Path], Any]:
    def make(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return make


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "recipe.toml: not valid TOML": _write("recipe.toml", "[run"),
    "recipe.toml: run.cycles does not say": _write("recipe.toml", "run = 5\n"),
    "recipe.toml: run.cycles does": _write("recipe.toml", "[run]\ncycles = '3'\n"),
    "recipe.toml: cannot be read (not UTF-8": lambda run: (run / "recipe.toml").write_bytes(b"\xff"),
    "metrics.jsonl: cannot be read (a pipe": _pipe("metrics.jsonl"),
    "metrics.jsonl:1: not a line": _write("metrics.jsonl", "5\n"),
    "'rollout/success' is no number": _write("metrics.jsonl", '{"cycle": 0, "rollout/success": "x"}\n'),
    "do not tell what the run cost": _write("timings.jsonl", '{"cycle": 0}\n'),
    "step-00000.json: not an evaluation": _write("evaluations/step-00000.json", "[]"),
    "probes/step-00001.json: not a record": _write("probes/step-00001.json", "{}"),
    "shift-00001.json: cannot be read (a pipe": _pipe("probes/shift-00001.json"),
}


@pytest.mark.parametrize("told", DAMAGE)
def test_the_page_stays_up_and_says_what_is_damaged(finished: Path, tmp_path: Path, told: str):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (run / "probes").mkdir()
    DAMAGE[told](run)
    with running(serve([run])) as server:
        assert told in unescape(get(server))
        assert told in state(server)["problem"]


def test_a_damaged_run_does_not_hide_the_others(finished: Path, tmp_path: Path):
    for name in ("whole", "evaluations", "recipe"):
        shutil.copytree(finished, tmp_path / name)
    (tmp_path / "evaluations" / "evaluations" / "step-00000.json").write_text("[]")
    (tmp_path / "recipe" / "recipe.toml").write_text("[run")
    watched = Watched([tmp_path], lambda found: f"<head>{page.POLICY}</head>{[run.folder for run in data.find(found)]}")
    assert f"[{(tmp_path / 'whole')!r}]" in watched.page()[1]
    problem = watched.state().problem
    assert "evaluations/step-00000.json: not an evaluation" in problem
    assert "recipe/recipe.toml: not valid TOML" in problem


def test_a_fault_while_drawing_is_told_and_the_server_stays(finished: Path):
    def render(found):
        raise ZeroDivisionError("drawn wrong")

    with running(Server("127.0.0.1", 0, Watched([finished], render), 5.0)) as server:
        assert "ZeroDivisionError: drawn wrong" in get(server)
        assert state(server)["problem"] == "ZeroDivisionError: drawn wrong"


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "word", "header"]
)
def test_a_client_that_does_not_finish_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(watch, "WAIT", 0.3)
    with running(serve([tmp_path])) as server, _connected(server) as client:
        client.sendall(sent)
        assert state(server)["ready"] is False  # others are served meanwhile
        assert client.recv(1) == b""


def test_a_client_that_drips_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "WAIT", 0.5)
    with running(serve([tmp_path])) as server, _connected(server) as client:
        client.settimeout(0.05)
        assert any(_is_over(client) for _ in range(600))


def _connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=30)


def _is_over(client: socket.socket) -> bool:
    """Send one byte more; whether the other side is gone."""
    try:
        client.sendall(b"x")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_there_are_never_too_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "CLIENTS", 2)
    with running(serve([tmp_path])) as server:
        idle = [_connected(server) for _ in range(3)]
        assert idle[2].recv(1) == b""
        for client in idle:
            client.close()


def test_odd_requests_are_answered(tmp_path: Path):
    with running(serve([tmp_path])) as server:
        own = f"localhost:{server.server_port}"
        assert request(server, path="http://[", host=own)[0] == 404
        assert request(server, path="/" + "x" * 70000, host=own)[0] == 414
        assert request(server, host=own + "\t" * 70000)[0] == 431
