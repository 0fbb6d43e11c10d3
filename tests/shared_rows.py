"""A step whose rows several ranks may share: what it is made of, and what it comes to. As a script it is one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from conftest import small

from past_opsd.core.losses import Imitate, Match, Reinforce, Stay
from past_opsd.core.nouns import Adapter, Forks, Term, View
from past_opsd.learner.step import Learner
from past_opsd.policy.distributed import World, joined
from past_opsd.policy.model import Model

HINT, PLAIN = (1, 5, 7, 2, 9, 9), (1, 5, 2)
LONG = tuple(2 + (7 * i) % 29 for i in range(33))


def terms_of(phase: Adapter) -> list[Term]:
    """All that looks at a whole response: forks, corrections for an engine, unsupervised positions; and one token."""
    other: Adapter = "student" if phase == "teacher" else "teacher"
    made: list[Term] = []
    drawn = [((), LONG), ((4,), LONG[:5]), ((), (*LONG[:9], 3, 3)), ((), (6,)), ((), LONG)]
    for i, (rest, tokens) in enumerate(drawn):
        live, frozen, start = View(phase, HINT + rest), View(other, PLAIN), i % 2 % len(tokens)
        sampled = tuple(-0.1 * (1 + t % 5) for t in range(len(tokens)))
        made += [
            Term("distill", live, frozen, tokens, Match(0.5), 0.2 + i, forks=Forks(0.2, 0.0), start=start),
            Term("distill/ce", live, None, tokens, Imitate(), 0.1),
            Term("reinforce", live, None, tokens, Reinforce(1.5 - i), 0.3, sampled=sampled),
            Term("stay", View(phase, PLAIN + rest), frozen, tokens, Stay(), 0.4, 0.7),
            Term("expert", live, View("expert", HINT), tokens, Match(), 0.5),
        ]
    return made


def assembled(world: World, *settings: str, split: int = 1) -> tuple[Model, Learner]:
    """The embedded model, off the identity, its bare base as the expert, and a learner beside an engine that drifts."""
    recipe = small("embedded/past", "model.expert='embedded'", "learner.token_budget=64", *settings)
    model = Model(recipe.model, 0, world, recipe.distributed.shard, split)
    model.perturb(0, 0.05)
    return model, Learner(model, recipe.learner, 1, drifts=True)


def step(model: Model, learner: Learner, phase: Adapter) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of all terms, and what is logged of them."""
    with model.training(phase):
        log = learner._accumulate(phase, terms_of(phase))
    pieces: list[Any] = [parameter.grad.flatten() for parameter in model.parameters(phase).values()]
    return torch.cat(pieces), log.summary()


if __name__ == "__main__":
    with joined() as everyone:
        everyone.connect(60)
        out, size, *words = sys.argv[1:]
        parts = assembled(everyone, *words, split=int(size))
        found = {phase: step(*parts, phase) for phase in ("teacher", "student")}
        torch.save(found, Path(out) / f"{everyone.rank}.pt")
