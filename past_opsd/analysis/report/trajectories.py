"""The trajectory browser's data: a run's own attempts, read token by token by student and teacher.

Attempts and continuations come from the run's records, both policies from the checkpoint of the boundary at which the
attempts were sampled: cycle k was sampled from p_k, and q_k drew its continuations. Numbers are those of the full
vocabulary; logits exist for a few positions at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from past_opsd.analysis.report.data import Method as Compared
from past_opsd.analysis.report.data import Run
from past_opsd.core import config
from past_opsd.core.losses import Divergence, Match
from past_opsd.core.nouns import Attempt, PastError, Problem, Tokens, View, derive_seed, route
from past_opsd.methods import Method
from past_opsd.policy.model import Model
from past_opsd.run import attempts, boundary, checkpoint
from past_opsd.run.attempts import Row
from past_opsd.run.folder import RunFolder, Series
from past_opsd.run.train import Session, session

MAX_TOKENS = 2000
MAX_CONTINUATION = 1000
MAX_CONTINUATIONS = 8
TOP = 5
UNIT = 10_000  # numbers are stored as whole multiples of 1 / UNIT
_CELLS = 1 << 22  # logits held at a time


@dataclass(frozen=True)
class Reading:
    """A response read by the student and, where there is one, by the teacher: one entry a token."""

    student_p: list[float]
    student_entropy: list[float]
    student_top: list[list[tuple[int, float]]]
    teacher_p: list[float]
    teacher_entropy: list[float]
    teacher_top: list[list[tuple[int, float]]]
    kl: list[float]
    clipped: list[int]


@torch.no_grad()
def read(
    model: Model,
    student: View,
    teacher: View | None,
    tokens: Tokens,
    temperature: float = 1.0,
    clip: Divergence | None = None,
    top: int = TOP,
) -> Reading:
    """KL(teacher || student), entropies, probabilities and the likeliest entries along `tokens`.

    `clip` counts the vocabulary entries whose contribution is cut: >= tau, [eq:pointwise-clipped-divergence].
    """
    reading = Reading([], [], [], [], [], [], [], [])
    ids = torch.tensor(tokens, device=model.device)
    chunks = [_log_probs(model, student, tokens, temperature)]
    if teacher is not None:
        chunks.append(_log_probs(model, teacher, tokens, temperature))
    done = 0
    for live, *frozen in zip(*chunks, strict=True):
        here = ids[done : done + len(live)]
        done += len(live)
        _extend(reading.student_p, reading.student_entropy, reading.student_top, live, here, top)
        for logp in frozen:
            _extend(reading.teacher_p, reading.teacher_entropy, reading.teacher_top, logp, here, top)
            reading.kl.extend(_listed(Match()(live, logp, here)))
            if clip is not None:
                reading.clipped.extend(_clipped(clip, live, logp))
    return reading


def _log_probs(model: Model, view: View, tokens: Tokens, temperature: float) -> Iterator[Tensor]:
    """[rows, V] in order, a few rows at a time."""
    states = model.hidden([(view, tokens)])
    network = model.expert if view.adapter == "expert" and model.expert is not None else model
    rows = max(1, _CELLS // len(network.head))
    for start in range(0, len(states), rows):
        yield network.log_probs(states[start : start + rows], temperature)


def _extend(
    p: list[float], entropy: list[float], best: list[list[tuple[int, float]]], logp: Tensor, ids: Tensor, top: int
) -> None:
    probabilities = logp.exp()
    p.extend(_listed(probabilities.gather(1, ids[:, None])[:, 0]))
    entropy.extend(_listed((probabilities * -logp.masked_fill(probabilities == 0, 0.0)).sum(-1)))
    if top:
        values, indices = probabilities.topk(min(top, logp.shape[-1]), dim=-1)
        best.extend(list(zip(i, v, strict=True)) for i, v in zip(_listed(indices), _listed(values), strict=True))


def _listed(values: Tensor) -> list[Any]:
    return cast("list[Any]", values.tolist())


def _clipped(loss: Divergence, live: Tensor, frozen: Tensor) -> list[int]:
    contribution, slope = torch.empty_like(live), torch.empty_like(live)
    loss.entries(live.exp(), frozen.exp(), frozen - live, contribution, slope)
    return _listed((contribution >= loss.tau).sum(-1))


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character made of several tokens belongs to the one that completes it."""
    out: list[str] = []
    known, begin = 0, 0  # ids[begin:known] is context for what comes next, so that a leading space is not lost
    for i in range(len(ids)):
        before = _decode(tokenizer, ids[begin:known])
        now = _decode(tokenizer, ids[begin : i + 1])
        unfinished = now.endswith("\N{REPLACEMENT CHARACTER}") and i - known < 4 and i + 1 < len(ids)
        if unfinished or len(now) < len(before):
            out.append("")
            continue
        out.append(now[len(before) :])
        begin, known = known, i + 1
    return out


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


class Vocabulary:
    """The entries that a page shows, each text once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, tokenizer: Any, id_: int) -> int:
        """Where the text of an entry stands; bytes that are no text on their own show as the tokenizer writes them."""
        text = _decode(tokenizer, [id_])
        if "\N{REPLACEMENT CHARACTER}" in text:
            text = str(tokenizer.convert_ids_to_tokens(id_))
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def boundaries(run: RunFolder, most: int = 3) -> list[int]:
    """Cycles with rollouts whose checkpoint is kept: the first, the last and one between."""
    kept = sorted({*run.rollouts.numbers()} & {*run.steps()})
    if len(kept) <= most:
        return kept
    return [kept[round(i * (len(kept) - 1) / (most - 1))] for i in range(most)]


def choose(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` attempts, failed and correct in turn; the same problems for every method of a seed where it can be."""

    def order(row: Row) -> int:
        return derive_seed(seed, "report", row["cycle"], row["problem"], row["trajectory"])

    rows = [row for row in rows if row["length"]]
    failed, correct = (sorted((r for r in rows if r["correct"] is c), key=order) for c in (False, True))
    wanted = min(count, len(rows))
    few = min(len(failed), max(wanted - wanted // 2, wanted - len(correct)))
    taken = [*failed[:few], *correct[: wanted - few]]
    return sorted(taken, key=lambda row: row["trajectory"])


def collect(methods: Sequence[Compared], count: int, trust: bool = False) -> dict[str, Any]:
    """What the page embeds: `count` attempts of one run of each method, or the reason why there are none.

    A run is opened for this. Without `trust` no code that its recipe names is run and nothing is fetched, and data of
    this machine is shown only where the run was trained on it.
    """
    vocabulary = Vocabulary()
    runs: list[dict[str, Any]] = []
    trajectories: list[dict[str, Any]] = []
    for method in methods if count > 0 else ():
        notes: list[str] = []
        for run in method.runs.values():
            try:
                # Nothing is sampled, so the recipe's engine, which may ask servers, is not built.
                named = [name for name in boundary.entrusted(run.recipe) if not name.startswith("engine.")]
                boundary.require_trust(RunFolder(run.folder), named, trust)
                found, about = _run(run, count, vocabulary, len(runs), trust)
            except PastError as error:
                # The first line alone: further ones may quote a file of this machine, and the page may be sent on.
                notes.append(f"{run.folder.name}: {str(error).splitlines()[0]}")
                continue
            trajectories += found
            runs.append({"method": method.label, "seed": run.seed, "note": " ".join(notes)} | about)
            break
        else:
            runs.append({"method": method.label, "note": " ".join(notes)})
    limits = {"tokens": MAX_TOKENS, "continuation": MAX_CONTINUATION, "continuations": MAX_CONTINUATIONS}
    return {
        "unit": UNIT,
        "limits": limits,
        "runs": runs,
        "vocabulary": vocabulary.texts,
        "trajectories": trajectories,
    }


def _run(
    run: Run, count: int, vocabulary: Vocabulary, index: int, trust: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    folder = RunFolder(run.folder)
    cycles = boundaries(folder)
    if not cycles:
        raise PastError(_nothing(folder))
    for cycle in cycles:
        path = folder.checkpoint(cycle)
        if (problem := checkpoint.damage(path)) is not None:
            raise PastError(f"{path.name} is damaged: {problem}")
    shares = [count // len(cycles) + (i < count % len(cycles)) for i in range(len(cycles))]
    out: list[dict[str, Any]] = []
    with session(config.load(folder.recipe_file, ["engine.name=torch"])) as assembled:
        _same_data(assembled, folder.checkpoint(cycles[0]), trust)
        problems = {p.id: p for p in assembled.task.train()}
        scribe = _Scribe(assembled, vocabulary)
        for cycle, share in zip(cycles, shares, strict=True):
            _load(assembled, folder.checkpoint(cycle))
            used = [row for row in _outline(folder.rollouts, cycle) if not row["discarded"]]
            wanted = choose(used, share, run.seed)
            rows = _rows(folder.rollouts, cycle, assembled, [row["place"] for row in wanted])
            shown = {row["trajectory"] for row in rows}
            drawn = [row for row in _outline(folder.continuations, cycle) if row["trajectory"] in shown]
            drawn = _rows(folder.continuations, cycle, assembled, [row["place"] for row in drawn])
            for row in rows:
                if row["problem"] not in problems:
                    raise PastError(f"problem {row['problem']} is not among the task's any more")
                place = {"id": f"r{index}-c{cycle}-{row['trajectory']}", "run": index, "cycle": cycle}
                own = [d for d in drawn if d["trajectory"] == row["trajectory"]]
                own.sort(key=lambda d: d["discarded"])
                out.append(place | scribe.trajectory(row, problems[row["problem"]], own))
    if not out:
        raise PastError("the method samples no responses in training")
    teacher = any("kl" in t for t in out)
    return out, {"measure": "kl" if teacher else "entropy", "tau": scribe.tau, "cycles": cycles}


def _outline(series: Series, cycle: int) -> list[Row]:
    """What is short of a cycle's rows; none where nothing was drawn."""
    return attempts.outline(series.path(cycle)) if os.path.lexists(series.path(cycle)) else []


def _rows(series: Series, cycle: int, session: Session, places: Sequence[int]) -> list[Row]:
    if not places:
        return []
    return attempts.read(series.path(cycle), len(session.model.head), session.model.max_context, set(places))


def _nothing(run: RunFolder) -> str:
    if not run.rollouts.numbers():
        return "the run has no recorded rollouts"
    return "no checkpoint of a cycle with rollouts is kept; run.keep_checkpoints and run.checkpoint_every decide that"


def _load(session: Session, path: Path) -> None:
    checkpoint.load_adapters(session.model, path)
    checkpoint.restore_method(path, checkpoint.read_state(path), session.loop.method)


def _same_data(session: Session, path: Path, trust: bool) -> None:
    """Whoever made the run may have named any file of the reader's, in the hope to be sent the report."""
    identity = checkpoint.read_state(path).get("identity")
    if not trust and (not isinstance(identity, dict) or identity.get("task") != session.task.identity):
        raise PastError(
            "the data that the recipe names is not, on this machine, what the run was trained on, so it is not shown; "
            "where it is yours to show, use --trust"
        )


def _objective(method: Method, attempt: Attempt, teacher: View) -> tuple[float, Divergence | None]:
    """The temperature and the clipped loss with which the method sets this teacher over the attempt."""
    for term in method.student_terms(route([attempt], [attempt.problem])):
        if term.frozen == teacher and term.live == attempt.view:
            loss = term.loss
            return term.temperature, loss if isinstance(loss, Divergence) and math.isfinite(loss.tau) else None
    return 1.0, None


class _Scribe:
    """Writes attempts as compact plain data."""

    def __init__(self, session: Session, vocabulary: Vocabulary):
        self._model = session.model
        self._method = session.loop.method
        self._tokenizer = session.model.tokenizer
        self._vocabulary = vocabulary
        self.tau: float | None = None

    def trajectory(self, row: Row, problem: Problem, drawn: Sequence[Row]) -> dict[str, Any]:
        attempt = attempts.attempt(row, problem)
        tokens = attempt.response.tokens[:MAX_TOKENS]
        teacher = self._method.teacher_view(attempt)
        there = teacher != attempt.view
        temperature, clip = self._objective(attempt, teacher) if there else (1.0, None)
        reading = read(self._model, attempt.view, teacher if there else None, tokens, temperature, clip)
        out: dict[str, Any] = {
            "problem": problem.id,
            "text": problem.text,
            "solution": problem.solution,
            "answer": problem.answer,
            "entropy": _whole(reading.student_entropy),
            "p": _whole(reading.student_p),
            "top": self._top(reading.student_top),
            "mean_entropy": _mean(reading.student_entropy),
            "continuations": [self._continuation(c, attempt, temperature) for c in drawn[:MAX_CONTINUATIONS]],
            "drawn": len(drawn),
        }
        if there:
            out |= {
                "kl": _whole(reading.kl),
                "mean_kl": _mean(reading.kl),
                "q": _whole(reading.teacher_p),
                "teacher_entropy": _whole(reading.teacher_entropy),
                "teacher_top": self._top(reading.teacher_top),
            }
        if clip is not None:
            out["clipped"] = reading.clipped
        return out | self._response(row, tokens)

    def _objective(self, attempt: Attempt, teacher: View) -> tuple[float, Divergence | None]:
        temperature, clip = _objective(self._method, attempt, teacher)
        self.tau = self.tau if clip is None else clip.tau
        return temperature, clip

    def _continuation(self, row: Row, attempt: Attempt, temperature: float) -> dict[str, Any]:
        """A teacher path; along a successful one [eq:failed-path-kl] is taken."""
        tokens = tuple(row["tokens"])[:MAX_CONTINUATION]
        out = self._response(row, tokens) | {"discarded": row["discarded"]}
        if row["correct"]:
            view = View(row["adapter"], tuple(row["prompt_tokens"]))
            kl = read(self._model, attempt.view, view, tokens, temperature, top=0).kl
            out |= {"kl": _whole(kl), "mean_kl": _mean(kl)}
        return out

    def _response(self, row: Row, tokens: Tokens) -> dict[str, Any]:
        out = {
            "correct": row["correct"],
            "reason": row["reason"],
            "given": row["answer"],
            "finished": row["finished"],
            "length": row["length"],
            "pieces": pieces(self._tokenizer, tokens),
        }
        # What the verifier and the teacher read is the recorded text; it is shown where the tokens say another one.
        written = self._tokenizer.decode(row["tokens"], skip_special_tokens=True)
        return out if written.strip() == row["text"].strip() else out | {"recorded": row["text"]}

    def _top(self, entries: Sequence[Sequence[tuple[int, float]]]) -> list[list[int]]:
        """Per token [entry, share, entry, share, ...]; entries below a thousandth are left out."""

        def place(id_: int) -> int:
            return self._vocabulary.place(self._tokenizer, id_)

        return [[n for id_, p in row if p >= 0.001 for n in (place(id_), round(p * UNIT))] for row in entries]


def _whole(values: Sequence[float]) -> list[int | None]:
    return [round(v * UNIT) if math.isfinite(v) else None for v in values]


def _mean(values: Sequence[float]) -> float | None:
    mean = math.fsum(values) / len(values)
    return round(mean, 6) if math.isfinite(mean) else None
