"""A second, slow writing of the paper's objectives: one sequence at a time, plain autograd through the whole model."""

from __future__ import annotations

import math

import torch
from rounding import assert_rounding
from torch import Tensor

from past_opsd.core.nouns import Adapter, Attempt, Batch, Group
from past_opsd.core.prompts import Prompts
from past_opsd.policy.model import Model
from past_opsd.run.train import Session


def perturb(parts: Session, *adapters: Adapter) -> None:
    """Move adapters away from the identity, alike in every session, so that reading the wrong one shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for adapter in adapters:
            for parameter in parts.model.parameters(adapter).values():
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
            parts.model.bump(adapter)
    parts.loop.publish()


def adamw_step(model: Model, adapter: Adapter, loss: Tensor | None) -> float:
    """AdamW's first step with lr = eps = 1: the bias-corrected moments are g and g^2, so p -= g / (|g| + 1).

    Returns the largest step of an entry.
    """
    assert loss is not None
    parameters = list(model.parameters(adapter).values())
    steps = [g / (g.abs() + 1.0) for g in torch.autograd.grad(loss, parameters)]
    with torch.no_grad():
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.sub_(step)
    return max(float(step.abs().max()) for step in steps)


def assert_same(mine: Session, other: Session, moved: float, adapter: Adapter = "student") -> None:
    """An adapter of both sessions after steps in which entries moved this far, up to rounding."""
    for name, value in other.model.parameters(adapter).items():
        assert_rounding(mine.model.parameters(adapter)[name], value, moved)


def logp(model: Model, adapter: str, prompt: tuple[int, ...], tokens: tuple[int, ...], grad: bool) -> Tensor:
    """log adapter(. | prompt, y_<t) for every t, [T, V], from the model's own logits."""
    if adapter == "base":
        context = model.peft.disable_adapter()
    else:
        model.peft.base_model.enable_adapter_layers()
        model.peft.set_adapter(adapter)
        for name in ("student", "teacher"):  # PEFT switches the other adapter's gradients off, even those pending
            for parameter in model.parameters(name).values():
                parameter.requires_grad_(True)
        context = torch.enable_grad()
    with context, torch.set_grad_enabled(grad):
        ids = torch.tensor([prompt + tokens])
        logits = model.peft(input_ids=ids).logits[0]
    return logits[len(prompt) - 1 : len(prompt) + len(tokens) - 1].log_softmax(-1)


def clipped_kl(p: Tensor, q: Tensor, tau: float) -> Tensor:
    """sum_v min(p (log p - log q), tau) per position."""
    total = torch.zeros(len(p))
    for t in range(len(p)):
        entries = p[t].exp() * (p[t] - q[t])
        total[t] = torch.where(entries < tau, entries, torch.full_like(entries, tau)).sum()
    return total


def exact_kl(q: Tensor, p: Tensor) -> Tensor:
    return (q.exp() * (q - p)).sum(-1)


def past_teacher_loss(
    model: Model, prompts: Prompts, batch: Batch, groups: list[Group], tau: float, beta: float
) -> Tensor | None:
    """L_T of the paper, branch by branch."""
    branches: list[Tensor] = []
    if batch.correct:
        losses = []
        for a in batch.correct:
            y = a.response.tokens
            p = logp(model, "student", prompts.student(a.problem), y, grad=False)
            q = logp(model, "teacher", prompts.hindsight(a.problem, a.response.text), y, grad=True)
            losses.append(clipped_kl(p, q, tau).mean())
        branches.append(torch.stack(losses).mean())
    active = [g for g in groups if any(c.verdict.correct for c in g.continuations)]
    if active:
        branches.append(torch.stack([failed_group_loss(model, prompts, g, beta) for g in active]).mean())
    return torch.stack(branches).mean() if branches else None


def failed_group_loss(model: Model, prompts: Prompts, group: Group, beta: float) -> Tensor:
    attempt = group.attempt
    prompt = prompts.hindsight(attempt.problem, attempt.response.text)
    rewards = [float(c.verdict.correct) for c in group.continuations]
    n = len(rewards)
    average = sum(rewards) / n
    policy = torch.zeros(())
    near: list[Tensor] = []
    if 0 < sum(rewards) < n:
        spread = math.sqrt(sum((r - average) ** 2 for r in rewards) / (n - 1))
        for c, reward in zip(group.continuations, rewards, strict=True):
            q = logp(model, "teacher", prompt, c.response.tokens, grad=True)
            chosen = q[torch.arange(len(q)), torch.tensor(c.response.tokens)]
            ratio = (chosen - chosen.detach()).exp()
            advantage = (reward - average) / (spread + 1e-4)
            clipped = ratio.clamp(0.8, 1.2)
            policy = policy - torch.minimum(ratio * advantage, clipped * advantage).mean() / n
    for c in group.continuations:
        if c.verdict.correct:
            q = logp(model, "teacher", prompt, c.response.tokens, grad=True)
            p = logp(model, "student", prompts.student(attempt.problem), c.response.tokens, grad=False)
            near.append(exact_kl(q, p).mean())
    return policy + beta * torch.stack(near).mean()


def student_loss(model: Model, attempts: tuple[Attempt, ...], targets: list[tuple[str, tuple]], tau: float) -> Tensor:
    """mean_i 1/T_i sum_t D_tau(target || student) on the student's own responses."""
    losses = []
    for a, (adapter, prompt) in zip(attempts, targets, strict=True):
        q = logp(model, adapter, prompt, a.response.tokens, grad=False)
        live = logp(model, "student", a.view.prompt, a.response.tokens, grad=True)
        losses.append(clipped_kl(q, live, tau).mean())
    return torch.stack(losses).mean()
