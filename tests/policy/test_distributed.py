"""One run as 1, 2 and 3 processes: gradients are summed in another order, so adapters agree up to rounding (see
`rounding.py`) of what moved, with steps that follow the gradient. Every sampled id is the same: with this seed no draw
of these runs falls within 1e-4 of where another token begins, a hundred times the rounding of a probability."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import chatml
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SMALL
from ranks import Launcher, environment
from rounding import CHAIN, EPS, assert_rounding
from safetensors.torch import load_file

from past_opsd.core.config import ModelSection
from past_opsd.core.launch import PORTS
from past_opsd.core.losses import Match
from past_opsd.core.nouns import PastError, Problem, View
from past_opsd.learner import Log
from past_opsd.policy import distributed
from past_opsd.policy.distributed import World, balance
from past_opsd.policy.fused import Job, Result
from past_opsd.policy.model import Model, resolve
from past_opsd.rollout.lab import Work, share_out
from past_opsd.run import checkpoint
from past_opsd.run.folder import RunFolder
from past_opsd.run.train import Session

FOLLOW = [f"learner.{a}.{k}" for a in ("student", "teacher") for k in ("eps=1.0", "lr=0.5")]
# Micro-batches of few tokens, so that the ranks have different numbers of them.
RUN = [*SMALL, *FOLLOW, "run.seed=1", "evaluation.at=[1.0]", "learner.token_budget=256"]
TINY = [*RUN, "rollout.problems_per_cycle=2"]
# Each start of several processes takes seconds.
MORE = pytest.mark.slow


DYNAMIC = ["embedded/grpo_dynamic", *RUN, "rollout.problems_per_cycle=3", "rollout.samples_per_problem=4"]


def words(folder: Path, settings: list[str], *more: str) -> list[str]:
    recipe, *rest = settings if "/" in settings[0] else ["embedded/past", *settings]
    options = [word for setting in rest for word in ("--set", setting)]
    return ["train", recipe, *options, "--out", str(folder), *more]


@pytest.fixture(scope="module")
def run(launch: Launcher, tmp_path_factory: pytest.TempPathFactory):
    """`run(size, settings)`: the folder of a complete run, made once."""
    made: dict[tuple[int, str], Path] = {}

    def make(size: int, settings: list[str], local: int | None = None) -> Path:
        key = (size, str(settings))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("runs") / "run"
            ended = launch(size, *words(made[key], settings), local=local)
            assert ended.codes == [0] * size, ended.err
            assert not any(ended.out[1:] + ended.err), "only the first process speaks, and of no trouble"
        return made[key]

    return make


def sampled(folder: Path) -> dict[str, object]:
    """Ids and verdicts of everything that was sampled."""
    out: dict[str, object] = {}
    for path in sorted(folder.glob("*/cycle-*.parquet")):
        table = pq.read_table(path).to_pydict()
        out[str(path.relative_to(folder))] = [table[key] for key in ("problem", "tokens", "correct", "reason")]
    for path in sorted((folder / "evaluations").iterdir()):
        out[path.name] = path.read_text()
    return out


def weights(folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    last = RunFolder(folder).checkpoint(step)
    files = sorted(last.rglob("*.safetensors"))
    return {f"{path.relative_to(last)} {k}": v for path in files for k, v in load_file(path).items()}


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same(one: Path, other: Path) -> None:
    assert sampled(one) == sampled(other)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    moved = max(float(v.abs().max()) for k, v in mine.items() if "lora_B" in k)  # which starts at zero
    assert moved > 1e-3
    for name, value in mine.items():
        if "adapter_model" in name:
            assert_rounding(theirs[name], value, moved)
    # A divergence near zero is a difference of log-probabilities of size 10, each from a hundred additions.
    for a, b in zip(lines(one), lines(other), strict=True):
        assert a == pytest.approx(b, rel=CHAIN * EPS, abs=128 * EPS)


def identical(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    same = all(torch.equal(value, theirs[name]) for name, value in mine.items())
    return same and lines(one) == lines(other) and sampled(one) == sampled(other)


@MORE
def test_two_processes_make_the_run_of_one(run):
    assert_same(run(1, RUN), run(2, RUN))


@MORE
def test_dynamic_sampling_replaces_the_same_problems_on_two_processes(run):
    one, two = run(1, DYNAMIC), run(2, DYNAMIC)
    assert_same(one, two)
    assert sum(line.get("rollout/replaced", 0) for line in lines(one)) > 0


@MORE
@pytest.mark.portable
def test_more_processes_than_problems_and_an_empty_branch(run):
    one, three = run(1, TINY), run(3, TINY)
    assert_same(one, three)
    assert {line["rollout/success"] for line in lines(one)} & {0.0, 1.0}, "no branch was ever empty"


@MORE
def test_a_sharded_base_changes_no_bit_even_where_a_rank_has_nothing_to_do(run):
    assert identical(run(3, TINY), run(3, [*TINY, "distributed.shard='full'", "model.gradient_checkpointing=true"]))


RECEIVED = """
import sys
from past_opsd.core.config import ModelSection
from past_opsd.core.nouns import View
from past_opsd.policy.distributed import joined
from past_opsd.policy.model import Model
with joined() as world:
    world.connect(60)
    for folders in zip(*[iter(sys.argv[1:])] * world.size):
        model = Model(ModelSection(path=folders[world.rank]), 0, world)
        states = model.hidden([(View("student", (1, 2, 3)), (4, 5))])
        print(model.digest_base(), states.double().sum().item().hex(), max(model.stops))
"""


@MORE
def test_only_the_first_process_reads_weights(launch: Launcher, tmp_path: Path):
    """The others' folders have none. One model has its head in its embeddings, one has not."""
    whole = [Path(resolve("embedded")), chatml.model(tmp_path / "qwen3", "{{ messages }}")]
    (whole[1] / "generation_config.json").write_text('{"eos_token_id": [1, 3000]}')
    folders = list[Path]()
    for i, folder in enumerate(whole):
        bare = tmp_path / f"bare-{i}"
        shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("*.safetensors", "generation_config.json"))
        folders += [folder, bare]
    script = tmp_path / "received.py"
    script.write_text(RECEIVED)
    ended = launch(2, str(script), *map(str, folders))
    assert ended.codes == [0, 0], ended.err
    alone = [Model(ModelSection(path=str(folder))) for folder in whole]
    first, second = (text.splitlines() for text in ended.out)
    assert first == second
    assert [line.split()[0] for line in first] == [model.digest_base() for model in alone]
    assert first[1].endswith(" 3000"), "the settings of generation are given too"


SPREAD = """
from torch.distributed.tensor import DTensor
from past_opsd.core.config import ModelSection
from past_opsd.policy.distributed import joined
from past_opsd.policy.model import Model
with joined() as world:
    world.connect(60)
    model = Model(ModelSection(path="embedded"), 0, world, shard="hybrid")
    weights = [p for p in model.network.parameters() if isinstance(p, DTensor)]
    held = sum(p.to_local().numel() for p in weights) / sum(p.numel() for p in weights)
    print(round(held, 3), weights[0].device_mesh.mesh.tolist())
"""


@MORE
def test_a_hybrid_base_is_spread_within_a_machine_and_copied_across(run, launch: Launcher, tmp_path: Path):
    script = tmp_path / "spread.py"
    script.write_text(SPREAD)
    ended = launch(4, str(script), local=2)
    assert (ended.codes, ended.out) == ([0] * 4, ["0.5 [[0, 1], [2, 3]]\n"] * 4), ended.err
    assert identical(run(4, TINY), run(4, [*TINY, "distributed.shard='hybrid'"], local=2))


@pytest.mark.parametrize("world", [World(2, 3, 0, 2), World(1, 4, 0, 2)], ids=["uneven", "cyclic"])
def test_machines_that_cannot_hold_a_copy_each_are_refused(past: Session, world: World):
    past.model.world = world
    with pytest.raises(PastError, match="numbered machine by machine"):
        past.model._mesh("hybrid")


@MORE
def test_srun_alone_starts_one_run(run, tmp_path: Path):
    """Two processes with what SLURM sets and nothing else."""
    with socket.socket() as probe:
        place = next(job for job in range(1000, 1100) if _free(probe, PORTS[job]))
    task = {"SLURM_JOB_ID": str(place), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    task |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, "-m", "past_opsd", *words(tmp_path / "run", RUN)]
    started = [
        subprocess.Popen(
            command,
            env=plain | task | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "PAST_LIFE": "off"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert not said[1], "only the first process speaks"
    assert {line["processes"] for line in RunFolder(tmp_path / "run").read_timings()} == {2}
    assert_same(run(1, RUN), tmp_path / "run")


def _free(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@MORE
@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_two_processes_resumes_under_another_number(run, launch: Launcher, tmp_path: Path, size: int):
    folder = tmp_path / "run"
    shutil.copytree(run(2, RUN), folder)
    shutil.rmtree(RunFolder(folder).checkpoint(3))
    settings = [*RUN, "distributed.shard='full'"] if size == 3 else RUN
    ended = launch(size, *words(folder, settings, "--resume"))
    assert ended.codes == [0] * size, ended.err
    assert f"resuming from {RunFolder(folder).checkpoint(2)}" in ended.out[0]
    assert_same(run(1, RUN), folder)


@MORE
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_run_with_one_message(run, launch: Launcher, tmp_path: Path, lost: int):
    folder = tmp_path / "run"
    fault = {"rank": lost, "kind": "kill", "at": [2, "adapt"]}
    ended = launch(2, *words(folder, RUN), fault=fault)
    assert ended.codes[lost] == -9
    assert ended.codes[1 - lost] == 2
    (message,) = ended.messages
    assert message.startswith(f"rank {lost} of 2 ended without a word")
    assert str(RunFolder(folder).checkpoint(2)) in message
    assert message.rstrip().endswith(f"--out {folder} --resume")
    assert "Traceback" not in message
    assert checkpoint.newest_whole(RunFolder(folder))[0] == RunFolder(folder).checkpoint(2)
    if lost == 1:
        assert launch(2, *words(folder, RUN, "--resume")).codes == [0, 0]
        assert identical(folder, run(2, RUN))


@MORE
@pytest.mark.parametrize(
    ("rank", "kind", "expected"),
    [
        (1, "nan", "teacher step stopped: 1 non-finite entries in the loss of term"),
        (1, "bug", "rank 1 of 2 failed:\nTraceback"),
        (0, "bug", "rank 0 of 2 failed:\nTraceback"),
        (1, "drift", "rank 1 has another teacher adapter after a step than rank 0"),
    ],
    ids=["nan", "bug", "bug-in-the-first", "drift"],
)
def test_a_fault_in_one_process_stops_all_before_anything_is_kept(
    launch: Launcher, tmp_path: Path, rank: int, kind: str, expected: str
):
    ended = launch(2, *words(tmp_path / "run", [*RUN, "evaluation.at=[]"]), fault={"rank": rank, "kind": kind})
    assert ended.codes == [2, 2]
    (message,) = ended.messages
    assert message.startswith(expected)
    assert "checkpoint-00000; continue with" in message
    assert RunFolder(tmp_path / "run").steps() == [0]


@MORE
def test_ctrl_c_in_one_process_stops_all_at_the_same_boundary(run, launch: Launcher, tmp_path: Path):
    folder = tmp_path / "run"
    ended = launch(2, *words(folder, RUN), fault={"rank": 1, "kind": "interrupt", "at": [0, "adapt"]})
    assert ended.codes == [130, 130]
    assert not ended.messages
    assert RunFolder(folder).steps()[-1] == 1
    assert len(lines(folder)) == 1


@MORE
def test_a_process_that_waits_for_a_stuck_one_can_be_ended(launch: Launcher, tmp_path: Path):
    """What a launcher does when it loses a process: SIGTERM for the rest, which sit in a call for the lost one."""
    ended = launch(2, *words(tmp_path / "run", RUN), fault={"rank": 1, "kind": "stop", "at": [1, "adapt"]})
    assert ended.codes == [2]
    (message,) = ended.messages
    assert message.startswith("rank 1 of 2 ended without a word")


ELASTIC = Path(__file__).parents[1] / "elastic.py"


def torchrun(options: list[str], command: list[str], faults: list[tuple[int, int, str]]) -> subprocess.Popen[str]:
    """`past` under torchrun with what goes wrong at each start; see `elastic.py`."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(ELASTIC), *command],
        env=environment() | {"FAULTS": json.dumps(faults)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@MORE
def test_torchrun_starts_a_killed_run_again_which_goes_on_by_itself(run, tmp_path: Path):
    folder = tmp_path / "run"
    kills = [(1, 0, "adapt"), (0, 1, "publish")]
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(len(kills))]
    started = torchrun(options, words(folder, RUN), kills)
    out, err = started.communicate(timeout=1200)
    assert started.returncode == 0, err
    assert identical(folder, run(2, RUN))
    said = " ".join(out.split())
    assert said.count("the launcher has started this job again, which goes on by itself") == len(kills)
    for boundary in (0, 1):
        assert f"resuming from {RunFolder(folder).checkpoint(boundary)}" in said
    # Every start has its own last words; those of the first must not silence the others.
    assert [text.split(" of 2 ended")[0] for text in err.split("past: ")[1:]] == ["rank 1", "rank 0"]
    assert err.count("torchrun starts the processes again") == len(kills)


@MORE
def test_what_a_first_start_refuses_a_restart_refuses_too(run, tmp_path: Path):
    """Else a forgotten --out would go on with somebody else's run."""
    folder = tmp_path / "run"
    shutil.copytree(run(2, RUN), folder)
    shutil.rmtree(RunFolder(folder).checkpoint(3))
    kept = RunFolder(folder).steps()
    started = torchrun(["--standalone", "--nproc-per-node", "1", "--max-restarts", "1"], words(folder, RUN), [])
    _, err = started.communicate(timeout=1200)
    assert started.returncode != 0
    assert err.count("already holds a run") == 2
    assert RunFolder(folder).steps() == kept


def test_a_job_remembers_what_an_earlier_start_began(monkeypatch: pytest.MonkeyPatch):
    store = torch.distributed.HashStore()
    starts = []
    for me in ("one", "two"):
        monkeypatch.setattr(distributed, "_me", lambda me=me: me)
        starts.append(distributed._is_new(store))
        world = World(job=distributed._job(store, starts[-1], not starts[-1]))
        assert world.begun("run") == world.restarted == (me == "two")
        world.begin("run")
        assert not world.begun("run"), "the same process twice in one folder is no restart"
        assert not world.begun("other")
    assert starts == [True, False]
    # A new store at a later start: the launcher's took the place of a lost one, the first process's says nothing.
    for kept in ("True", "False"):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept)
        world = World(job=distributed._job(torch.distributed.HashStore(), True, True))
        assert world.begun("run") == (kept == "True")
    assert not World().begun("run")


def test_a_start_meets_apart_from_what_an_earlier_one_left():
    store = torch.distributed.HashStore()
    for key in ("call/0", "call/1", "answer/old-1", "old-0/joined/0", "old-0/joined/1", "old-0/spoken"):
        store.set(key, f"old-{key[-1]}")
    other = threading.Thread(target=lambda: distributed._fresh(store, 1).set("joined/1", ""))
    other.start()
    fresh = distributed._fresh(store, 0)
    fresh.set("joined/0", "")
    distributed._call_together(fresh, store, 2)
    other.join(60)
    assert fresh.check(["joined/0", "joined/1"])
    assert not fresh.check(["spoken"])


@MORE
def test_mistakes_are_told_once(launch: Launcher, tmp_path: Path):
    ended = launch(2, *words(tmp_path / "run", ["run.cylces=3"]))
    assert ended.codes == [2, 2]
    (message,) = ended.messages
    assert "did you mean 'cycles'?" in message
    ended = launch(2, "demo", "--out", str(tmp_path / "demo"))
    assert ended.codes == [2, 2]
    assert ended.messages == ["only train and eval run as several processes; start this without it\n"]


@MORE
def test_torchrun_evaluates_like_one_process(launch: Launcher, tmp_path: Path):
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["eval", "embedded/past", *settings, "--out"]
    assert launch(1, *command, str(tmp_path / "one.json")).codes == [0]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "past_opsd"]
    done = subprocess.run(
        [sys.executable, *torchrun, *command, str(tmp_path / "two.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Avg@4") == 1
    assert (tmp_path / "two.json").read_text() == (tmp_path / "one.json").read_text()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_shares_are_whole_even_and_keep_prompts_together(size: int):
    problem = Problem("p", "", "", "")
    lengths = [4] * 6 + [9] * 6 + [30] * 2
    work = [Work(problem, View("student", (1,) * n), seed) for seed, n in enumerate(lengths)]
    shares = share_out(work, size, max_new_tokens=8)
    assert sorted(i for share in shares for i in share) == list(range(len(work)))
    loads = [len(share) for share in shares]
    assert max(loads) - min(loads) <= 3
    homes = [sum(any(i in share for i in range(6)) for share in shares)]
    assert max(homes) <= -(-6 // -(-len(work) // size))


def test_balance_gives_nobody_twice_the_mean():
    costs = [1.0 + i % 7 for i in range(40)]
    loads = [sum(costs[i] for i in own) for own in balance(costs, 4)]
    assert max(loads) - min(loads) <= 2
    assert balance([5.0, 1.0], 3) == [[0], [1], []]
    assert balance([1.0, 2.0, 3.0], 1) == [[0, 1, 2]]


def test_logs_of_ranks_add_up_to_the_log_of_one():
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for lengths in ([3, 2], [4], [1, 5, 2]):
        n = sum(lengths)
        names = ("kl", "clipped", "removed", "dot", "norm_clipped", "norm_unclipped")
        rows = {name: torch.rand(n, generator=generator, dtype=torch.float64) for name in names}
        values, weight, entropy = torch.rand(3, n, generator=generator)
        result = Result(torch.empty(0), [values], {"entropy": entropy}, [rows])
        starts = {"correct": [int(length > 2) for length in lengths]}
        pieces.append((lengths, {"correct": Job(Match(0.5), weight)}, result, starts))
    whole, merged = Log(), Log()
    for piece in pieces:
        whole.add(*piece)
        part = Log()
        part.add(*piece)
        merged.merge(part)
    assert merged.summary() == pytest.approx(whole.summary(), rel=1e-12)
    assert merged.objective == pytest.approx(whole.objective, rel=1e-12)


def test_a_world_of_one_exchanges_nothing():
    world, tensor = World(), torch.ones(2)
    world.connect(1.0)
    world.sum([tensor])
    world.barrier()
    world.agree("thing", 1)
    assert (world.alone, world.first, world.gather(3), world.any(True)) == (True, True, [3], True)
    assert world.share(lambda: "made") == "made"
    assert torch.equal(tensor, torch.ones(2))
