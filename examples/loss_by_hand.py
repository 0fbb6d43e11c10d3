"""A loss by hand: value and gradient of one position, beside the package's own.

python examples/loss_by_hand.py
"""

from __future__ import annotations

import torch

from past_opsd.core.losses import Match


def squared_hellinger(live_logp: torch.Tensor, frozen_logp: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A loss is any function of log-probabilities [T, V] and token ids [T] that gives one value a position [T]."""
    return 1 - (0.5 * (live_logp + frozen_logp)).exp().sum(-1)


def main() -> dict[str, float]:
    """Print what each loss says of the same two distributions, and where its gradient pushes the logits."""
    logits = torch.tensor([[2.0, 0.5, -1.0]], requires_grad=True)
    teacher = torch.tensor([[0.2, 0.7, 0.1]]).log()
    token = torch.tensor([0])
    values = {}
    for name, loss in {
        "Hellinger": squared_hellinger,
        "KL": Match(tau=float("inf")),
        "clipped KL": Match(0.05),
    }.items():
        value = loss(logits.log_softmax(-1), teacher, token)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        values[name] = value.item()
        print(f"{name:>10s} {value.item():.4f}   d/dlogits {[round(g, 4) for g in gradient[0].tolist()]}")
    return values


if __name__ == "__main__":
    main()
