"""Nothing that is loaded runs code, unless a person asked for it. Every bait leaves a mark when it is taken."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Quiet
from safetensors.torch import load_file

from past_opsd.analysis import watch
from past_opsd.analysis.report import data, figures, trajectories
from past_opsd.analysis.report.data import find
from past_opsd.core import config
from past_opsd.core.config import ModelSection, Recipe
from past_opsd.core.nouns import PastError, Problem, Response
from past_opsd.core.prompts import Prompts
from past_opsd.interface import arguments, cli
from past_opsd.policy.model import Model, load_tokenizer
from past_opsd.policy.pretrained import hardware, load_network, read_config
from past_opsd.rollout import serve
from past_opsd.rollout.verifiers import boxed_math
from past_opsd.run import boundary, checkpoint, export
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import assemble, train
from past_opsd.tasks import dataset, embedded

TINY = ["run.cycles=1", "rollout.problems_per_cycle=2", "evaluation.at=[]", "model.lora.rank=2"]


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """A file that nothing may make; the test ends by looking for it."""
    file = tmp_path / "taken"
    yield file
    assert not file.exists(), "code was run"


class Bait:
    def __init__(self, mark: Path):
        self._mark = mark

    def __reduce__(self):
        return Path.touch, (self._mark,)


def taken(mark: Path) -> bool:
    """Whether the mark is there; it is taken away for what comes next."""
    found = mark.exists()
    mark.unlink(missing_ok=True)
    return found


def test_the_baits_work(mark: Path):
    pickle.loads(pickle.dumps(Bait(mark)))
    assert taken(mark)


# Checkpoints and models


@pytest.fixture
def recipe(small_recipe) -> Recipe:
    return small_recipe("embedded/past", *TINY)


def test_pickles_in_a_checkpoint_are_left_alone(
    mark: Path, finished: Path, tmp_path: Path, recipe: Recipe, quiet: Quiet
):
    shutil.copytree(finished, tmp_path / "run")
    path = RunFolder(tmp_path / "run").checkpoint(1)
    names = ("optimizer.pt", "adapter_model.bin", "pytorch_model.bin", "training_args.bin", "rng_state.pth", "x.pkl")
    for name in names:
        torch.save(Bait(mark), path / name)
        torch.save(Bait(mark), path / "teacher" / name)
    assert train(recipe, tmp_path / "run", True, quiet).finished
    (path / "adapter_model.safetensors").unlink()
    parts = assemble(recipe)
    with pytest.raises(PastError, match="cannot be read as safetensors"):
        checkpoint.load_adapter(parts.model, "student", path)
    parts.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model, to be made dangerous."""
    return Path(shutil.copytree(embedded.model_path(), tmp_path / "model"))


def section(folder: Path, **settings) -> ModelSection:
    return ModelSection.model_validate({"path": str(folder)} | settings)


def edit(file: Path, **entries) -> None:
    plain = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(plain | entries))


def test_a_pickle_instead_of_weights_is_refused(mark: Path, folder: Path):
    torch.save({"model.embed_tokens.weight": Bait(mark)}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(PastError, match=r"model\.path: .*cannot be loaded"):
        load_network(section(folder), str(folder), hardware(section(folder)))


def test_plain_tensors_in_a_pickle_are_weights(mark: Path, folder: Path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    _, network = load_network(section(folder), str(folder), hardware(section(folder)))
    assert sum(p.numel() for p in network.parameters()) > 1000


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Own(PretrainedConfig):
    model_type = "own"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder: Path, mark: Path) -> None:
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    edit(
        folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    )


def test_code_in_a_model_folder_is_run_only_when_trusted(
    mark: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with_code(folder, mark)
    for load in (read_config, lambda s: load_network(s, s.path, hardware(s)), Model):
        with pytest.raises(PastError, match=r"model\.trust_remote_code"):
            load(section(folder))
        assert not mark.exists()
    read_config(section(folder, trust_remote_code=True))
    assert taken(mark)


def test_code_in_a_tokenizer_folder_is_run_only_when_trusted(
    mark: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    names = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    edit(folder / "tokenizer_config.json", **names)
    load_tokenizer(section(folder))  # of a known architecture, so the library's own class is there to take its place
    assert not mark.exists()
    with_code(folder, mark)
    with pytest.raises(PastError, match=r"model\.trust_remote_code"):
        load_tokenizer(section(folder))
    assert not mark.exists()
    load_tokenizer(section(folder, trust_remote_code=True))
    assert taken(mark)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
        "{% for c in ().__class__.__base__.__subclasses__() %}{{ c.__name__ }}{% endfor %}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{% set x = messages.clear() %}{{ raise_exception.__globals__ }}",
    ],
    ids=range(6),
)
def test_a_chat_template_is_rendered_in_a_sandbox(mark: Path, folder: Path, recipe: Recipe, template: str):
    (folder / "chat_template.jinja").write_text(template.replace("MARK", str(mark)))
    with pytest.raises(PastError, match=r"chat template cannot render prompts\.student"):
        Prompts(load_tokenizer(section(folder)), recipe.prompts).student(Problem("a", "1+1", "2", "2"))
    with pytest.raises(PastError, match="chat template"):
        assemble(recipe.model_copy(update={"model": section(folder)}))


# Data


def options(source: Path | str) -> dataset.Options:
    return dataset.Options.model_validate({"train": str(source), "evaluation": {"a": str(source)}})


def test_a_script_in_a_dataset_folder_is_not_run(mark: Path, tmp_path: Path):
    pytest.importorskip("datasets")
    place = tmp_path / "scripted"
    place.mkdir()
    (place / "scripted.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    for source in (place, f"hf:{place}"):
        with pytest.raises(PastError, match=str(place)):
            dataset.build(options(source))


def test_pickles_in_a_table_stay_bytes(mark: Path, tmp_path: Path):
    """A column of pickles, and a column whose type asks the reader to unpickle something."""
    payload = pickle.dumps(Bait(mark))
    kind = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    typed = pa.field("extra", pa.binary(), metadata=kind)
    rows = [pa.array([r"1+1"]), pa.array([r"\boxed{2}"]), pa.array([payload]), pa.array([payload])]
    fields = [pa.field("problem", pa.string()), pa.field("solution", pa.string()), pa.field("more", pa.binary()), typed]
    pq.write_table(pa.table(rows, schema=pa.schema(fields)), tmp_path / "a.parquet")
    (problem,) = dataset.build(options(tmp_path / "a.parquet")).train()
    assert problem.extra["more"] == payload


def test_an_answer_is_never_evaluated(mark: Path):
    said = rf"\boxed{{__import__('pathlib').Path('{mark}').touch()}}"
    with boxed_math.BoxedMath(boxed_math.Options(workers=1)) as verifier:
        problem = Problem("a", "1+1", "2", r"\frac{x}{2}")
        assert not verifier.verify([(problem, Response((), said, (), True))])[0].correct


# Other people's runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_recipe) -> Path:
    folder = tmp_path_factory.mktemp("security") / "run"
    train(small_recipe("embedded/past", *TINY), folder, False, Quiet())
    return folder


@pytest.fixture
def foreign(mark: Path, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A finished run of somebody else, whose recipe names a module that lies within reach."""
    folder = Path(shutil.copytree(finished, tmp_path / "foreign"))
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nfrom past_opsd.tasks.embedded import *\n"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text(code)
    (tmp_path / "theirs" / "task.py").write_text(code)
    text = (folder / "recipe.toml").read_text()
    assert text.count('name = "embedded"') == 1
    (folder / "recipe.toml").write_text(text.replace('name = "embedded"', 'name = "theirs.task"'))
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


def test_a_recipe_of_ones_own_runs_the_code_it_names(mark: Path, foreign: Path):
    config.load(foreign / "recipe.toml")
    assert taken(mark)


@pytest.mark.slow
def test_looking_at_a_run_of_somebody_else_runs_nothing(mark: Path, foreign: Path, capsys: pytest.CaptureFixture[str]):
    (run,) = find([foreign])
    assert run.recipe.task.name == "theirs.task"
    assert config.dump(run.recipe)["task"]["train_problems"] == 60
    assert cli.main(["report", str(foreign)]) == 0
    assert "theirs.task" in (foreign / "report" / "index.html").read_text()
    assert export.export(foreign, foreign / "export").is_dir()
    assert "theirs.task" in (foreign / "export" / "README.md").read_text()


@pytest.mark.parametrize("command", ["probe", "shift"])
def test_working_with_a_run_of_somebody_else_asks_first(
    mark: Path, foreign: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main([command, str(foreign)]) == 2
    assert "would run code from outside the package: task.name = 'theirs.task'" in capsys.readouterr().err
    assert not mark.exists()


def test_a_run_of_somebody_else_is_opened_when_trusted(mark: Path, foreign: Path):
    with boundary.opened(foreign, 1, trust=True) as at:
        assert taken(mark)
        assert at.step == 1


def test_a_run_that_trusts_remote_code_is_not_trusted_itself(mark: Path, foreign: Path):
    text = (foreign / "recipe.toml").read_text()
    (foreign / "recipe.toml").write_text(text.replace("trust_remote_code = false", "trust_remote_code = true"))
    with pytest.raises(PastError, match=r"model\.trust_remote_code = true.*--trust"):
        export.export(foreign, foreign / "export")
    with pytest.raises(PastError, match=r"task\.name = 'theirs\.task', model\.trust_remote_code = true.*--trust"):
        boundary.opened(foreign, 1).__enter__()


def test_a_verifier_of_somebody_else_is_told(foreign: Path, recipe: Recipe, small_recipe):
    other = small_recipe("embedded/past", *TINY, "verifier.name='function'", "verifier.path='os:remove'")
    assert boundary.code(other) == ["verifier.path = 'os:remove'"]
    assert boundary.code(recipe) == []


# Links in other people's runs


@pytest.fixture
def trapped(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of a run to set traps in; they lead to files of the reader, which must stay as they are."""
    mine = tmp_path / "mine"
    (mine / "folder").mkdir(parents=True)
    (mine / "file").write_text("secret")
    yield Path(shutil.copytree(finished, tmp_path / "run"))
    assert sorted(p.name for p in mine.rglob("*")) == ["file", "folder"]
    assert (mine / "file").read_text() == "secret"


def trap(run: Path, name: str) -> None:
    """A link under this name, to a folder of the reader where a folder is expected and to a file where not."""
    place = run / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(run.parent / "mine" / ("file" if "." in place.name.lstrip(".") else "folder"))


@pytest.mark.parametrize("name", ["report/.index.html.part", "report/index.html", "probes/.step-00001.json.part"])
def test_a_link_with_the_name_that_a_page_once_was_written_to_is_not_followed(
    trapped: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    """Refused, since it leads out of the run; through a link that stays inside, the page is written."""
    trap(trapped, name)
    assert cli.main(["report", str(trapped), "--trajectories", "0"]) == 2
    assert "is a link that leads out of the run" in capsys.readouterr().err
    (trapped / name).unlink()
    (trapped / name).symlink_to(trapped / "recipe.toml")
    recipe = (trapped / "recipe.toml").read_bytes()
    assert cli.main(["report", str(trapped), "--trajectories", "0"]) == 0
    assert (trapped / "report" / "index.html").read_text().startswith("<!doctype html>")
    assert (trapped / "recipe.toml").read_bytes() == recipe


READ = ("metrics.jsonl", "timings.jsonl", "recipe.toml", "evaluations", "checkpoints", "rollouts", "probes")
WRITTEN = ("report", "report/figures", "export", "profile", "checkpoints/.writing-checkpoint-00002", "data", "wandb")


@pytest.mark.parametrize("name", [*READ, *WRITTEN, "checkpoints/checkpoint-00001/state.json"])
@pytest.mark.parametrize("command", ["report", "export", "probe", "train"])
def test_nothing_is_read_or_written_through_a_link_out_of_a_run(
    trapped: Path, recipe: Recipe, quiet: Quiet, name: str, command: str, capsys: pytest.CaptureFixture[str]
):
    trap(trapped, name)
    if command == "train":
        with pytest.raises(PastError, match="is a link that leads out of the run"):
            train(recipe, trapped, True, quiet)
        return
    assert cli.main([command, str(trapped)]) == 2
    assert "is a link that leads out of the run" in (said := capsys.readouterr().err)
    assert "secret" not in said


@pytest.mark.slow
def test_a_run_that_is_a_link_itself_is_a_run(finished: Path, tmp_path: Path, recipe: Recipe, quiet: Quiet):
    (tmp_path / "disk").mkdir()
    shutil.copytree(finished, tmp_path / "disk" / "run")
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "one").symlink_to(tmp_path / "disk" / "run")
    for run in (tmp_path / "runs" / "run", tmp_path / "one"):
        assert train(recipe, run, True, quiet).finished
        assert cli.main(["report", str(run), "--trajectories", "0"]) == 0
        assert export.export(run, run / "export").is_dir()


def test_a_manifest_leads_nowhere_else(trapped: Path):
    path = RunFolder(trapped).checkpoint(1)
    for name in ("../../recipe.toml", str(trapped.parent / "mine" / "file"), "teacher/../../../recipe.toml"):
        file = path / checkpoint.MANIFEST
        plain = json.loads(file.read_text())
        file.write_text(json.dumps(plain | {name: {"bytes": 6, "sha256": "0" * 64}}))
        assert checkpoint.damage(path) == f"MANIFEST.json lists {name}, which is elsewhere"
        file.write_text(json.dumps(plain))


def test_figures_are_not_drawn_through_a_link(trapped: Path, tmp_path: Path):
    (found,) = [figure for figure in figures.figures(find([trapped])) if figure.name == "cost"]
    for name in ("cost.svg", "cost.pdf"):
        (tmp_path / name).symlink_to(tmp_path / "mine" / "file")
    assert all(not path.is_symlink() for path in figures.save(found, tmp_path))


# Servers


def test_servers_are_for_this_machine_alone(tmp_path: Path):
    with watch.serve([tmp_path]) as server:
        assert server.server_address[0] == "127.0.0.1"
    for declare in (arguments.watch, arguments.serve):
        parser = argparse.ArgumentParser()
        declare(parser)
        assert parser.get_default("host") == "127.0.0.1"
    words = serve.command(config.load("embedded/past"), parser.get_default("host"), 8000)
    assert words[words.index("--host") + 1] == "127.0.0.1"


# What a stranger's recipe is given


class Listener:
    """A real server that keeps what it is sent, and sends those who ask on to another address."""

    def __init__(self, onward: str = ""):
        self.keys: list[str | None] = []
        heard = self.keys

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heard.append(self.headers.get("Authorization"))
                self.send_response(302 if onward else 404)
                self.send_header("Location", onward)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def rewritten(run: Path, target: Path, *settings: str) -> Path:
    """A copy of a run whose recipe says something else."""
    shutil.copytree(run, target)
    (target / "recipe.toml").write_text(config.to_toml(config.load(run / "recipe.toml", settings)))
    return target


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.delenv("PAST_VLLM_HOSTS", raising=False)


@pytest.mark.usefixtures("key")
def test_a_key_goes_to_no_server_of_a_strangers_recipe(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with Listener() as theirs:
        server = ["engine.name=vllm", "engine.mode=server", f"engine.urls=['{theirs.url}']"]
        run = rewritten(finished, tmp_path / "run", *server)
        for command in ("probe", "shift"):
            assert cli.main([command, str(run)]) == 2
            said = capsys.readouterr().err
            assert f"engine.urls: prompts and VLLM_API_KEY to {theirs.url}" in said
            assert "which PAST_VLLM_HOSTS does not name" in said
            assert "secret" not in said
        (found,) = find([run])
        browser = trajectories.collect(data.methods([found]), 1)
        assert len(browser["trajectories"]) == 1  # read without the engine
        assert export.export(run, run / "export").is_dir()
        assert theirs.keys == []
        for trust, hosts in ((True, ""), (False, theirs.url.removeprefix("http://")), (False, "a, 127.0.0.1")):
            monkeypatch.setenv("PAST_VLLM_HOSTS", hosts)
            with pytest.raises(PastError, match="no vLLM server answers"):
                boundary.opened(run, 1, trust).__enter__()
            assert theirs.keys.pop() == "Bearer secret"


@pytest.mark.usefixtures("key")
def test_a_key_does_not_follow_a_server_that_sends_it_on(finished: Path, tmp_path: Path):
    with Listener() as other, Listener(other.url) as first:
        server = ["engine.name=vllm", "engine.mode=server", f"engine.urls=['{first.url}']"]
        run = rewritten(finished, tmp_path / "run", *server)
        with pytest.raises(PastError, match="status 302"):
            boundary.opened(run, 1, trust=True).__enter__()
        assert (first.keys, other.keys) == (["Bearer secret"], [])


@pytest.mark.parametrize(
    "url",
    [
        "http://me:word@host:1",
        "http://good.example@evil.example",
        "http://h?key=word",
        "http://h:99999",
        "http://h:0",
        "http://",
        "ftp://h",
        "http://h#word",
        "http://[::1",
        "http://h/\\u0000",
        "http://h\\u0020x",
    ],
)
def test_an_address_is_an_address_alone(url: str):
    with pytest.raises(PastError, match=r"engine\.urls: .*(not an address like|no user, password)"):
        config.load("embedded/past", ["engine.name=vllm", f'engine.urls=["{url}"]'])


@pytest.mark.parametrize(
    "setting",
    [
        "worker_cls='a.B'",
        "worker_extension_cls='a.B'",
        "tool_parser_plugin='x.py'",
        "load_format='pt'",
        "tokenizer_mode='custom'",
        "hf_overrides={architectures=['x']}",
        "middleware=['a.b']",
        "tokenizer='x/y'",
        "download_dir='/'",
        "max_num_seqs='x'",
        "seed=[1]",
        "scheduler_cls='a.B'",
        "compilation_config={level=3}",
    ],
)
def test_an_argument_that_names_something_needs_trust(finished: Path, tmp_path: Path, setting: str):
    run = rewritten(finished, tmp_path / "run", "engine.name=vllm", f"engine.arguments={{{setting}}}")
    with pytest.raises(PastError, match=rf"engine\.arguments\.{setting.partition('=')[0]} = .*--trust"):
        boundary.opened(run, 1).__enter__()


def test_sizes_need_no_trust_and_names_are_written_one_way(small_recipe):
    sizes = "engine.arguments={max_num_seqs=4, enforce_eager=true, tensor_parallel_size=2}"
    assert boundary.entrusted(small_recipe("embedded/past", "engine.name=vllm", sizes)) == []
    for name in ("trust-remote-code", "--worker-cls", "Worker_cls", "trust_remote_code", "a.b"):
        with pytest.raises(PastError, match=r"engine\.arguments.*(how vLLM names|model\.trust_remote_code)"):
            small_recipe("embedded/past", "engine.name=vllm", f"engine.arguments={{'{name}'=true}}")


@pytest.mark.parametrize(
    ("setting", "named"),
    [("model.path=nobody/none", "model.path = 'nobody/none'"), ("model.expert=nobody/none", "model.expert")],
)
def test_nothing_is_fetched_for_a_strangers_recipe(finished: Path, tmp_path: Path, setting: str, named: str):
    run = rewritten(finished, tmp_path / "run", setting)
    for look in (lambda: boundary.opened(run, 1).__enter__(), lambda: export.export(run, run / "export", merge=True)):
        with pytest.raises(PastError, match=rf"{named} .*from the hub.*--trust"):
            look()


def test_no_other_file_enters_a_strangers_recipe(finished: Path, tmp_path: Path):
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    secret = tmp_path / "secret.toml"
    secret.write_text('name = "mine alone"\n')
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(f'extends = "{secret}"\n' + text.replace("\nname =", "\n# name =", 1))
    assert config.load(run / "recipe.toml").name == "mine alone"
    for look in (lambda: find([run]), lambda: RunFolder(run).recipe()):
        with pytest.raises(PastError, match="does not follow 'extends'"):
            look()


def test_data_of_the_readers_is_shown_only_where_the_run_was_trained_on_it(finished: Path, tmp_path: Path):
    """A stranger who guesses where a file lies is not sent it inside the report."""
    mine = tmp_path / "mine.jsonl"
    rows = [{"id": f"{i}", "problem": "secret", "solution": r"\boxed{1}"} for i in range(9)]
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["task.name=dataset", f"task.train={mine}", f"task.evaluation={{a='{mine}'}}"]
    run = rewritten(finished, tmp_path / "run", *settings)
    (found,) = find([run])
    shown = trajectories.collect(data.methods([found]), 1)
    assert "not, on this machine, what the run was trained on" in shown["runs"][0]["note"]
    assert "secret" not in json.dumps(shown)
    mine.write_text('{"problem": 5, "secret": 1}\n')
    assert "secret" not in json.dumps(trajectories.collect(data.methods([found]), 1))
