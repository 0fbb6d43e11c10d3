"""What `past trace` prints: one recipe in detail, or several settings as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from past_opsd.analysis.needs import Needs
from past_opsd.policy.estimate import GIB, GPUS, assumed
from past_opsd.policy.memory import SHARE

KINDS = ("weights", "adapters", "optimizer", "gradients", "activations", "logits and loss", "KV cache")
PHASES = ("sampling", "teacher step", "student step", "evaluation")
READS = 6


def detail(needs: Needs, gpu: str) -> str:
    """One setting: memory by phase and kind, launches, reads, arithmetic and attention."""
    recipe, size = needs.recipe, GPUS[gpu][2]
    student, evaluation = recipe.rollout.student.max_new_tokens, recipe.evaluation.sampling.max_new_tokens
    processes = f"{needs.processes} processes" if needs.processes > 1 else "one process"
    processes += f", {needs.split} to a row" if needs.split > 1 else ""
    lines = [
        f"{recipe.name}: {recipe.model.path}, {needs.choice}, {processes}",
        f"responses of {student:,} tokens, rows of up to {needs.longest:,}; "
        f"evaluation: {needs.rows} rows of {evaluation:,}",
        "",
        _row("GiB", [*("logits" if kind == "logits and loss" else kind for kind in KINDS), "peak"], 12),
    ]
    for name, phase in needs.phases.items():
        cells = [f"{phase.kinds.get(kind, 0) / GIB:.2f}" for kind in KINDS]
        lines.append(
            f"{_row(name, [*cells, f'{phase.peak / GIB:.2f}'], 12)}{'' if needs.fits(name, size) else '  does NOT fit'}"
        )
    lines += [f"of {size / GIB:.1f} GiB on {gpu}, of which {SHARE:.0%} may be used", *_evaluation(needs), ""]
    dtypes = sorted({dtype for phase in needs.phases.values() for dtype in phase.flops})
    lines.append(_row("", ["launches", "reads", *(f"TFLOP {dtype}" for dtype in dtypes)], 15))
    for name, phase in needs.phases.items():
        work = [f"{phase.flops[dtype] / 1e12:,.2f}" for dtype in dtypes]
        each = ", a token" if name in ("sampling", "evaluation") else ""
        lines.append(_row(name + each, [f"{phase.launches:,}", f"{sum(phase.reads.values()):,}", *work], 15))
    lines += ["", "attention, calls by the kernel that they can use:", *_attention(needs), ""]
    reads = Counter({f"{name}: {place}": n for name, p in needs.phases.items() for place, n in p.reads.items()})
    lines.append("where the host waits most for a value:")
    lines += [f"  {n:6,}  {place}" for place, n in reads.most_common(READS)]
    return "\n".join(lines)


def table(found: Sequence[Needs], gpu: str) -> str:
    """A row for each setting, as Markdown: peaks in GiB, and what does not fit."""
    lines = [
        f"| recipe, model | GPUs | responses | longest row | {' | '.join(PHASES)} | rows that fit | s a cycle |",
        "|---" * (6 + len(PHASES)) + "|",
    ]
    for needs in found:
        recipe = needs.recipe
        peaks = [_cell(needs, name, gpu) for name in PHASES]
        rows = str(needs.rows) if "evaluation" in needs.phases else "servers'"
        shared = f", {needs.split} a row" if needs.split > 1 else ""
        cells = [f"{recipe.name}, {recipe.model.path.rpartition('/')[2]}", f"{needs.processes}{shared}"]
        cells += [
            f"{recipe.rollout.student.max_new_tokens:,}",
            f"{needs.longest:,}",
            *peaks,
            rows,
            f"{cycle(needs, gpu):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cycle(needs: Needs, gpu: str) -> float:
    """Seconds of a cycle on such GPUs; decoding reads the weights once for all rows of a batch."""
    load = needs.load
    rows = [-(-samples // needs.processes) for samples in (load.student_samples, load.teacher_samples)]
    phases, teacher = (needs.seconds(assumed(gpu, n)) for n in rows)
    return sum((phases | ({"draw": teacher["draw"]} if "draw" in phases else {})).values())


def _cell(needs: Needs, name: str, gpu: str) -> str:
    if name not in needs.phases:
        return "-"
    return f"{needs.phases[name].peak / GIB:.1f}" + ("" if needs.fits(name, GPUS[gpu][2]) else " **no**")


def _evaluation(needs: Needs) -> list[str]:
    if "evaluation" not in needs.phases:
        return [f"responses are drawn by engine.name = '{needs.recipe.engine.name}', whose memory is not traced"]
    length = f"{needs.recipe.evaluation.sampling.max_new_tokens:,}"
    batch = needs.recipe.engine.model_dump().get("batch", 0)
    if not needs.rows:
        return [f"not even one response of {length} tokens can be decoded in evaluation"]
    if needs.rows < batch:
        return [f"of {batch} rows {needs.rows} can be decoded to {length} tokens in evaluation; the others wait"]
    return []


def _attention(needs: Needs) -> list[str]:
    out: list[str] = []
    for name, phase in needs.phases.items():
        calls = [
            f"{n:,} {kernel}" + (f" (not flash: {why})" if why else "")
            for (kernel, why), n in phase.attention.most_common()
        ]
        out.append(f"  {name + ':':14s} {', '.join(calls)}")
    return out


def _row(name: str, cells: Sequence[str], width: int) -> str:
    return f"{name:20s}" + "".join(f"{cell:>{width}s}" for cell in cells)
