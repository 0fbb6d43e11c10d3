"""`past export RUN`: the trained student for other programs, as a PEFT adapter or merged into its base.

adapter_config.json, adapter_model.safetensors     as PEFT, vLLM and lm-evaluation-harness load them
model.safetensors, config.json                     instead of these two with --merge
tokenizer files, chat template, README.md          the card says what was trained on what, and how it scored
.past-export.json                                  the files above and their digests: a later export replaces only these
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch

from past_opsd.core import config
from past_opsd.core.config import Recipe
from past_opsd.core.files import write_text
from past_opsd.core.marked import replacing
from past_opsd.core.nouns import PastError, derive_seed
from past_opsd.core.reading import room
from past_opsd.core.stats import EDGE, bootstrap, choose_unit
from past_opsd.policy.model import Model, in_order
from past_opsd.policy.pretrained import SHIPPED, hub_id, load_tokenizer, resolve
from past_opsd.run import boundary, checkpoint
from past_opsd.run.folder import ADAPTER, RECORDS, RunFolder

MARK = ".past-export.json"


def export(run: Path, out: Path, *, step: int | None = None, merge: bool = False, trust: bool = False) -> Path:
    """Write the student of a checkpoint to `out`: a new or empty folder, or an earlier export.

    Of an earlier one only the files that it wrote are replaced, all at once; whatever else lies there stays.
    """
    opened = RunFolder(run)
    recipe = opened.recipe()
    needed = [name for name in boundary.entrusted(recipe) if name.startswith("model.")]  # no other part is built
    boundary.require_trust(opened, needed, trust)
    source = opened.checkpoint(boundary.choose(run, step)[0])
    room(out, folder=True)
    with replacing(_target(run, out), MARK) as folder:
        if merge:
            _merged(recipe, source, folder)
        else:
            _adapter(recipe, source, folder)
        load_tokenizer(recipe.model).save_pretrained(str(folder))
        write_text(folder / "README.md", card(recipe, run, source, merge))
    return out


def _target(run: Path, out: Path) -> Path:
    """The folder that `out` means, where it is none of the run's own."""
    target, root = Path(os.path.realpath(out)), Path(os.path.realpath(run))
    if target == root or target in root.parents:
        raise PastError(f"--out {out} is the run's own folder or holds it; choose another --out")
    if any(target.is_relative_to(root / name) for name in RECORDS):
        raise PastError(f"--out {out} is among the run's own records; choose another --out")
    if target.exists() and not target.is_dir():
        raise PastError(f"--out {out} is a file; choose another --out")
    return target


def _adapter(recipe: Recipe, source: Path, out: Path) -> None:
    for name in ADAPTER:
        shutil.copyfile(source / name, out / name)
    plain = json.loads((out / ADAPTER[0]).read_text(encoding="utf-8"))
    plain |= {"base_model_name_or_path": resolve(recipe.model.path), "revision": recipe.model.revision}
    plain["target_modules"] = in_order(plain["target_modules"])
    write_text(out / ADAPTER[0], json.dumps(plain, indent=2, sort_keys=True) + "\n")


def _merged(recipe: Recipe, source: Path, out: Path) -> None:
    section = recipe.model.model_copy(update={"expert": None})
    model = Model(section, seed=derive_seed(recipe.run.seed, "adapters") >> 1)
    checkpoint.load_adapter(model, "student", source)
    with torch.no_grad():
        merged = model.peft.merge_and_unload(adapter_names=["student"])
    merged.save_pretrained(str(out))


def card(recipe: Recipe, run: Path, source: Path, merge: bool) -> str:
    """The model card: what was trained, on what, and how it scored before and after."""
    step = RunFolder(run).checkpoints.number(source)
    hub = hub_id(recipe.model.path)
    lines = [
        "---",
        *([f"base_model: {hub}"] if hub else []),
        "library_name: " + ("transformers" if merge else "peft"),
        "pipeline_tag: text-generation",
        f"tags: [past-opsd, on-policy-self-distillation, {recipe.method.name}]",
        "---",
        f"# {recipe.name}, after {step} updates",
        "",
        f"{'The base model with the student merged in' if merge else 'A LoRA adapter'}: the student of a "
        f"`{recipe.method.name}` run on {_base(recipe, hub)}, seed {recipe.run.seed}, made with past-opsd. "
        "It reads the problem alone; no reference solution is needed to use it.",
        "",
        *_scores(run, step),
        "## Training",
        f"- task: `{recipe.task.name}`, verifier: `{recipe.verifier.name}`",
        f"- {recipe.rollout.problems_per_cycle} problems x {recipe.rollout.samples_per_problem} responses an update, "
        f"at most {recipe.rollout.student.max_new_tokens} tokens, temperature {recipe.rollout.student.temperature:g}",
        f"- LoRA rank {recipe.model.lora.rank}, alpha {recipe.model.lora.alpha:g}; "
        f"learning rates {recipe.learner.student.lr:g} (student), {recipe.learner.teacher.lr:g} (teacher)",
        "",
        "## Prompt",
        "The user message in evaluation, rendered with the chat template in this folder:",
        "",
        *(f"    {line}" for line in recipe.prompts.evaluation.splitlines()),
        "",
        "## The whole recipe",
        "```toml",
        config.to_toml(recipe).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _base(recipe: Recipe, hub: str | None) -> str:
    """The base model in words: where a reader finds it, or that it is local."""
    path, revision = recipe.model.path, f" at revision `{recipe.model.revision}`" if recipe.model.revision else ""
    if hub == path:
        return f"[{hub}](https://huggingface.co/{hub}){revision}"
    if hub is not None:
        return f"a local copy of [{hub}](https://huggingface.co/{hub}){revision} (`{path}`)"
    shipped = "that comes with past-opsd" if path in SHIPPED else "in a folder or file of the machine that trained it"
    return f"the local model `{path}`, {shipped}; it has no id on the hub"


def _scores(run: Path, step: int) -> list[str]:
    """A table of the evaluations up to the exported boundary; nothing where none was made."""
    evaluations = [e for at, e in RunFolder(run).read_evaluations().items() if at <= step]
    if not evaluations:
        return []
    names = list(evaluations[0].tasks)
    told = f"Avg@{evaluations[0].samples} in percent, with the 95 % interval of the macro average ({EDGE})."
    out = ["## Scores", told, ""]
    out += [f"| updates | {' | '.join(names)} | macro |", "|---:" * (len(names) + 2) + "|"]
    for evaluation in evaluations:
        outcomes = evaluation.outcomes()
        cells = [f"{100 * outcomes[name].mean():.1f}" for name in names]
        unit = choose_unit(sets := {name: values[None] for name, values in outcomes.items()})
        macro = None if unit is None else bootstrap(sets, unit=unit)
        shown = "" if macro is None else f" [{100 * macro.low:.1f}, {100 * macro.high:.1f}]"
        mean = sum(float(values.mean()) for values in outcomes.values()) / len(outcomes)
        out.append(f"| {evaluation.step} | {' | '.join(cells)} | {100 * mean:.1f}{shown} |")
    return [*out, ""]


def push(
    folder: Path,
    repository: str,
    private: bool,
    *,
    token: str | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Upload the folder to the hub, with the user's own token unless one is given, to `main` or a branch."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi(token=token)
    try:
        made = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(made, branch=revision, exist_ok=True)
        where: dict[str, Any] = {"repo_id": made, "folder_path": str(folder), "revision": revision}
        return str(cast(Any, api).upload_folder(**where, ignore_patterns=[MARK], commit_message=message))
    except HFValidationError as error:
        raise PastError(f"--push {repository}: {error}") from None
    except Exception as error:  # the transport's errors differ between versions of the hub's client
        reason = str(error).strip().split("\n")[0]
        raise PastError(
            f"--push {repository}: the hub refused or cannot be reached ({reason}); {folder} is written, "
            "log in with 'hf auth login' and push again"
        ) from None
