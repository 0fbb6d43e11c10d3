"""A run's folder: what it holds, under which names, and how each kind is written and read.

Every name stands in `LAYOUT` alone; whoever wants a file of a run asks its `RunFolder`. What a kind of file holds
stands where it is both written and read: lines here, responses in attempts.py, scores in evaluate.py, probes and shifts
in measurements.py, and a checkpoint's own files in checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from past_opsd.core import files, lock
from past_opsd.core.files import append, own, sweep, sync, write_text, writing
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import is_table, read_bytes

if TYPE_CHECKING:
    from past_opsd.core.config import Recipe
    from past_opsd.run.attempts import Row
    from past_opsd.run.evaluate import Evaluation

RECIPE, CODE, METRICS, TIMINGS = "recipe.toml", "code", "metrics.jsonl", "timings.jsonl"
ROLLOUTS, CONTINUATIONS, PHASE1 = "rollouts", "continuations", "phase1"
EVALUATIONS, CHECKPOINTS, PROBES, PROFILE, REPORT = "evaluations", "checkpoints", "probes", "profile", "report"
DATA, COMPLETIONS, EXPORT, MERGED = "data", "completions", "export", "export-merged"
TENSORBOARD, TRACKERS = "tensorboard", "trackers.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
STATE, MANIFEST, TEACHER = "state.json", "MANIFEST.json", "teacher"
OPTIMIZERS = {"student": "optimizer-student.safetensors", "teacher": "optimizer-teacher.safetensors"}
CHECKPOINT = frozenset({*ADAPTER, *(f"{TEACHER}/{name}" for name in ADAPTER), *OPTIMIZERS.values(), STATE})
"""What a whole checkpoint has besides its manifest."""
UNTRAINED = "untrained"
"""Not in a run but beside several: the folder of the scores before the first update, which runs of a seed share."""
PREPARATION = -1
"""In the timings, the cycle of what a method does before the first one."""
DEPTH = 3
"""How far below a folder its runs may be."""
_NUMBER = r"(?:[0-9]{5}|[1-9][0-9]{5,})"


@dataclass(frozen=True)
class Entry:
    """A file of a run's folder, or a folder in it; `inside` is what the files in there are called, a pattern of `re`.

    A folder that is `foreign` belongs to another program: what that keeps inside is its own affair.
    """

    name: str
    inside: str
    example: str
    what: str
    by: str
    foreign: bool = False


LAYOUT = (
    Entry(RECIPE, "", "", "the recipe with every setting", "`past train`"),
    Entry(
        CODE,
        r"(?:method|task|verifier|engine)\.py",
        "method.py",
        "the source of classes and functions that the recipe names as `module:name`; never run",
        "`past train`",
    ),
    Entry(
        METRICS, "", "", "one line a cycle; follows from the recipe, so that runs compare byte by byte", "`past train`"
    ),
    Entry(
        TIMINGS,
        "",
        "",
        "seconds by phase, one line a cycle, after one for what comes before the first; they never repeat",
        "`past train`",
    ),
    Entry(
        ROLLOUTS,
        rf"cycle-{_NUMBER}\.parquet",
        "cycle-00003.parquet",
        "the student's responses of a cycle, with their verdicts",
        "`past train`",
    ),
    Entry(
        CONTINUATIONS,
        rf"cycle-{_NUMBER}\.parquet",
        "cycle-00003.parquet",
        "the teacher's responses of a cycle, with the trajectory that each continues",
        "`past train`",
    ),
    Entry(
        PHASE1,
        rf"[0-9a-f]{{32}}\.parquet|{re.escape(TIMINGS)}",
        "",
        "what a method sampled before the first cycle, batch by batch, and the seconds that it took",
        "`past train`",
    ),
    Entry(
        EVALUATIONS,
        rf"step-{_NUMBER}\.json",
        "step-00025.json",
        "outcomes and answers on the held-out sets at a boundary",
        "`past train`",
    ),
    Entry(
        CHECKPOINTS,
        rf"[^/]*checkpoint-{_NUMBER}[^/]*/(?:{'|'.join(map(re.escape, sorted({*CHECKPOINT, MANIFEST})))})",
        "checkpoint-00025/",
        "all that a resume needs at a boundary; the student as plain PEFT loads it",
        "`past train`",
    ),
    Entry(
        PROBES,
        rf"(?:step|shift)-{_NUMBER}\.json",
        "step-00025.json, shift-00025.json",
        "what the teacher uses, and what of it can reach the student, at a boundary",
        "`past probe`, `past shift`",
    ),
    Entry(
        PROFILE,
        r"phases\.json|trace\.json|operations-[0-9]+(?:-[a-z]+)?\.json\.gz",
        "phases.json, trace.json, operations-00001-adapt.json.gz",
        "where the time goes",
        "`past train --profile`",
    ),
    Entry(
        REPORT,
        r"index\.html|figures/[^/]+\.(?:svg|pdf)",
        "index.html, figures/",
        "the report and its figures",
        "`past report`",
    ),
    Entry(DATA, r"[^/]+\.jsonl", "train.jsonl, eval.jsonl", "the datasets that a script gave", "`PASTTrainer`"),
    Entry(
        COMPLETIONS,
        r"completions_[0-9]+\.parquet",
        "completions_00003.parquet",
        "a step's responses as TRL writes them",
        "`PASTTrainer`",
    ),
    Entry(
        EXPORT, r".+", "", "the student as a PEFT adapter with its tokenizer and card", "`past export`, `PASTTrainer`"
    ),
    Entry(MERGED, r".+", "", "the model with the student merged in", "`past export --merge`"),
    Entry(TENSORBOARD, r".+", "", "event files", "`past train --track`"),
    Entry(TRACKERS, "", "", "the run's id at the trackers", "`past train --track`"),
    Entry("wandb", r".+", "", "what that tracker keeps", "`past train --track`", foreign=True),
    Entry("trackio", r".+", "", "what that tracker keeps", "`past train --track`", foreign=True),
    Entry(lock.NAME, "", "", "who writes the folder now", "`past train`"),
)
TRAINED = frozenset(
    {RECIPE, METRICS, TIMINGS, ROLLOUTS, CONTINUATIONS, PHASE1, EVALUATIONS, CHECKPOINTS, PROBES, lock.NAME}
)
"""What training and looking into a run leave."""
RECORDS = frozenset(
    {CODE, CHECKPOINTS, EVALUATIONS, ROLLOUTS, CONTINUATIONS, PHASE1, PROBES, REPORT, PROFILE, DATA, COMPLETIONS}
)
"""The folders in which nothing else may be put."""
REPORTED = (RECIPE, METRICS, TIMINGS, f"{EVALUATIONS}/*.json", f"{PROBES}/*.json")
"""What a report is drawn from, as patterns of `glob`."""


def is_ours(path: str, names: Iterable[str]) -> bool:
    """Whether a path, relative to a run's folder, is of a file that these entries hold."""
    first, _, rest = path.partition("/")
    return any(e.name == first and e.name in names and re.fullmatch(e.inside, rest) is not None for e in LAYOUT)


def table() -> str:
    """What a run's folder holds, as the documentation shows it."""
    lines = ["| in a run's folder | what | written by |", "|---|---|---|"]
    for entry in LAYOUT:
        name = f"`{entry.name}{'/' if entry.inside else ''}`"
        lines.append(f"| {f'{name} {entry.example}'.strip()} | {entry.what} | {entry.by} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Series:
    """Files or folders of one kind, numbered by cycle or boundary; a copy under another name is none of them."""

    folder: Path
    prefix: str
    suffix: str = ""

    def path(self, number: int) -> Path:
        """Where the one of this number is, or would be."""
        return self.folder / f"{self.prefix}{number:05d}{self.suffix}"

    def number(self, path: Path) -> int:
        """Of one of them; -1 for another name."""
        found = re.fullmatch(rf"{re.escape(self.prefix)}({_NUMBER}){re.escape(self.suffix)}", path.name)
        return int(found[1]) if found else -1

    def numbers(self) -> list[int]:
        """Of those that are there, in order."""
        there = (path for path in self.folder.glob(f"{self.prefix}*{self.suffix}") if self.suffix or path.is_dir())
        return sorted(number for number in map(self.number, there) if number >= 0)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, there or to be."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    # Places

    @property
    def recipe_file(self) -> Path:
        return self.path / RECIPE

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS

    @property
    def timings_file(self) -> Path:
        return self.path / TIMINGS

    @property
    def trackers_file(self) -> Path:
        return self.path / TRACKERS

    @property
    def rollouts(self) -> Series:
        return Series(self.path / ROLLOUTS, "cycle-", ".parquet")

    @property
    def continuations(self) -> Series:
        return Series(self.path / CONTINUATIONS, "cycle-", ".parquet")

    @property
    def completions(self) -> Series:
        return Series(self.path / COMPLETIONS, "completions_", ".parquet")

    def phase1_batch(self, digest: str) -> Path:
        """Where a batch of samples from before the first cycle is, or would be."""
        return self.path / PHASE1 / f"{digest}.parquet"

    @property
    def phase1_timings(self) -> Path:
        return self.path / PHASE1 / TIMINGS

    @property
    def evaluations(self) -> Series:
        return Series(self.path / EVALUATIONS, "step-", ".json")

    @property
    def probes(self) -> Series:
        return Series(self.path / PROBES, "step-", ".json")

    @property
    def shifts(self) -> Series:
        return Series(self.path / PROBES, "shift-", ".json")

    @property
    def checkpoints(self) -> Series:
        return Series(self.path / CHECKPOINTS, "checkpoint-")

    @property
    def profile(self) -> Path:
        return self.path / PROFILE

    @property
    def data(self) -> Path:
        return self.path / DATA

    @property
    def tensorboard(self) -> Path:
        return self.path / TENSORBOARD

    @property
    def page(self) -> Path:
        """The report."""
        return self.path / REPORT / "index.html"

    def export(self, merged: bool = False) -> Path:
        """Where the student goes, unless another place is named."""
        return self.path / (MERGED if merged else EXPORT)

    # The whole

    def exists(self) -> bool:
        """Whether this is a run: it has its recipe."""
        return self.recipe_file.is_file()

    def enclosed(self) -> None:
        """Refuse a run in which a file or folder of ours is a link that leads out of it; the lock sees to its own."""
        files.enclosed(self.path, {entry.name: not entry.foreign for entry in LAYOUT if entry.name != lock.NAME})

    def steps(self) -> list[int]:
        """Boundaries with a checkpoint, oldest first."""
        return self.checkpoints.numbers()

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a boundary is, or would be."""
        return self.checkpoints.path(step)

    def newest(self) -> Path | None:
        """The newest checkpoint by name alone: nothing is read, for use when everything must end."""
        found = self.steps()
        return self.checkpoint(found[-1]) if found else None

    def rewind(self, next_cycle: int) -> None:
        """Forget everything from `next_cycle` on: a cycle after the last boundary leaves no trace."""
        for name in ("", ROLLOUTS, CONTINUATIONS, PHASE1, EVALUATIONS, PROFILE):
            sweep(self.path / name)
        for file in (self.metrics_file, self.timings_file):
            if os.path.lexists(file):
                _cut(file, next_cycle)
        for series, first in ((self.rollouts, 0), (self.continuations, 0), (self.evaluations, 1)):
            for file in (series.path(n) for n in series.numbers() if n >= next_cycle + first):
                if file.is_file() or file.is_symlink():
                    file.unlink()

    # Reading and writing

    def recipe(self) -> Recipe:
        """The run's own recipe; no module that it names is imported, since it may be somebody else's."""
        from past_opsd.core import config

        if not self.exists():
            raise PastError(f"{self}: not a run folder (it holds no {RECIPE}); give the --out folder of 'past train'")
        self.enclosed()
        return config.load(self.recipe_file, imports=False)

    def write_recipe(self, recipe: Recipe) -> None:
        """With every setting."""
        from past_opsd.core import config

        write_text(self.recipe_file, config.to_toml(recipe))

    def write_code(self, sources: Mapping[str, str]) -> None:
        """What a recipe names that is somebody's own, by section, as it was written; it is kept, and never run."""
        for kind, text in sources.items():
            write_text(self.path / CODE / f"{kind}.py", text)

    def read_metrics(self) -> list[dict[str, Any]]:
        """One line a cycle."""
        return read_lines(self.metrics_file)

    def read_timings(self) -> list[dict[str, Any]]:
        """One line a cycle, after one for what came before the first."""
        return read_lines(self.timings_file)

    def add_line(self, file: Path, line: Mapping[str, Any]) -> None:
        """To the metrics or to timings, on the disk itself: the checkpoint that follows must not be there first."""
        append(file, json.dumps(line) + "\n")
        with writing(file):
            sync(file)

    def write_attempts(self, series: Series, k: int, rows: Iterable[Row]) -> None:
        """The rollouts or the continuations of a cycle."""
        from past_opsd.run import attempts

        attempts.write(series.path(k), rows)

    def read_evaluations(self) -> dict[int, Evaluation]:
        """Every one that there is, by boundary."""
        return {step: self.read_evaluation(step) for step in self.evaluations.numbers()}

    def read_evaluation(self, step: int) -> Evaluation:
        """The one of a boundary."""
        from past_opsd.run.evaluate import Evaluation

        file = self.evaluations.path(step)
        found = Evaluation.load(file)
        if found.step != step:
            raise PastError(f"{file}: holds the evaluation of step {found.step}, so it is not what the run wrote")
        return found

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Under its own boundary."""
        evaluation.save(self.evaluations.path(evaluation.step))

    def read_probes(self) -> dict[int, dict[str, Any]]:
        """What `past probe` measured, by boundary."""
        return self._measured(self.probes, "probe")

    def read_shifts(self) -> dict[int, dict[str, Any]]:
        """What `past shift` measured, by boundary."""
        return self._measured(self.shifts, "shift")

    def _measured(self, series: Series, kind: str) -> dict[int, dict[str, Any]]:
        from past_opsd.run import measurements

        return {step: measurements.load(series.path(step), kind) for step in series.numbers()}

    def write_probe(self, step: int, result: Mapping[str, Any]) -> Path:
        """What `past probe` measured at a boundary."""
        return self._measure(self.probes.path(step), result)

    def write_shift(self, step: int, result: Mapping[str, Any]) -> Path:
        """What `past shift` measured at a boundary."""
        return self._measure(self.shifts.path(step), result)

    def _measure(self, file: Path, result: Mapping[str, Any]) -> Path:
        from past_opsd.run import measurements

        self.enclosed()
        measurements.save(file, result)
        return file

    # Digests

    def name(self, file: Path) -> str:
        """A file of this folder, as records name it."""
        return file.relative_to(self.path).as_posix()

    def altered(self, digests: Mapping[str, str]) -> list[str]:
        """Which of these records, by name or line, are there and are not what was digested."""
        lines = {line_name(line["cycle"]): line_digest(line) for line in self.read_metrics()}
        closed = (ROLLOUTS, CONTINUATIONS, EVALUATIONS)
        files = {name: self.path / name for name in digests if is_ours(name, closed)}
        found = lines | {name: file_digest(file) for name, file in files.items() if file.is_file()}
        return [name for name, digest in digests.items() if found.get(name, digest) != digest]


def runs_below(path: Path, tell: Callable[[str], None] = lambda text: None, depth: int = DEPTH) -> list[RunFolder]:
    """The runs at or below a path, `depth` levels down; a folder that cannot be read is told and passed over."""
    run = RunFolder(path)
    try:
        if run.exists():
            return [run]
        if depth == 0 or not path.is_dir():
            return []
        inner = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:  # it went away, or is not ours to read
        tell(f"{path} is left out: it cannot be read ({error.strerror})")
        return []
    return [found for folder in inner for found in runs_below(folder, tell, depth - 1)]


def file_digest(file: Path) -> str:
    """Of what a file holds."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def line_name(cycle: int) -> str:
    """How the metrics of a cycle are named among the digests."""
    return f"{METRICS}, cycle {cycle}"


def line_digest(line: Mapping[str, Any]) -> str:
    """Of what a line of the metrics says."""
    return hashlib.blake2b(json.dumps(line).encode(), digest_size=16).hexdigest()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a last line cut by a kill is left out."""
    if not os.path.lexists(file):
        return []
    lines = read_bytes(file).split(b"\n")
    return [_parse(file, number, line) for number, line in enumerate(lines[:-1], 1) if line]


def _cut(path: Path, next_cycle: int) -> None:
    """Shorten, not write anew: a kill here must not cost the lines that stay."""
    with writing(path):
        own(path)
    end = 0
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        if line and _parse(path, number, line)["cycle"] >= next_cycle:
            break
        end += len(line) + 1
    with writing(path):
        os.truncate(path, end)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    found: Any = None
    try:
        found = json.loads(line)
        wrong = _wrong(found, PREPARATION if path.name == TIMINGS else 0)
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong:
        raise PastError(f"{path}:{number}: not a line that a run wrote ({wrong:.200}); mend it or delete it")
    return found


def _wrong(line: Any, first: int) -> str:
    """What a line has that no run writes; numbers that are not finite may stand there."""
    if not is_table(line):
        return "not an object"
    cycle = line.get("cycle")
    if type(cycle) is not int or not first <= cycle < 10**9:
        return "it does not say of which cycle it is"
    for key, value in line.items():
        if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= 2**63):
            return f"{key!a:.80} is no number"
        if not key.isprintable() or len(key) > 200:
            return f"{key!a:.80} is no name"
    return ""
