"""Sample and verify: the one door to responses, used by rollouts, continuations and Avg@k alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import Adapter, Attempt, View, Work, derive_seed
from past_opsd.policy.distributed import World, balance
from past_opsd.rollout.engines import Engine, Request
from past_opsd.rollout.verifiers import Verifier


def share_out(work: Sequence[Work], size: int, max_new_tokens: int) -> list[list[int]]:
    """The items of every rank: samples of one prompt together, unless that left a rank idle; then evenly by length."""
    limit = -(-len(work) // size)
    prompts: dict[View, list[int]] = {}
    for i, item in enumerate(work):
        prompts.setdefault(item.view, []).append(i)
    pieces = [own[i : i + limit] for own in prompts.values() for i in range(0, len(own), limit)]
    costs = [len(work[piece[0]].view.prompt) + len(piece) * max_new_tokens for piece in pieces]
    return [sorted(i for n in bin_ for i in pieces[n]) for bin_ in balance(costs, size)]


@dataclass
class Lab:
    """An engine and a verifier, and the ranks that share the work."""

    engine: Engine
    verifier: Verifier
    span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    """Entered around the verifier's work, so that its time is told apart from sampling."""
    world: World = field(default_factory=World)
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around sampling by every rank, also by one without a request."""
    tell: Callable[[int, int, str], None] = lambda done, total, what: None
    """Hears how many of how many responses are drawn, where the engine counts them, and that they are verified."""

    def __post_init__(self) -> None:
        if hasattr(self.engine, "tell"):
            setattr(self.engine, "tell", self._drawn)  # noqa: B010

    def _drawn(self, done: int, total: int) -> None:
        self.tell(done, total, "responses")

    def rest(self) -> None:
        """An optimizer step follows: an engine that shares the trainer's memory may leave it until it is next asked."""
        if hasattr(self.engine, "sleep"):
            getattr(self.engine, "sleep")()  # noqa: B009

    def attempt(self, work: Sequence[Work], sampling: Sampling, versions: Mapping[Adapter, int]) -> list[Attempt]:
        """One verified attempt per item, in order: every rank gets all of them, whoever sampled."""
        if not work:
            return []
        if self.world.alone:
            return self._own(work, sampling, versions)
        self.world.agree("batch of requests", derive_seed(*(w.seed for w in work)))
        shares = share_out(work, self.world.size, sampling.max_new_tokens)
        own = self._own([work[i] for i in shares[self.world.rank]], sampling, versions)
        parts = self.world.gather([(a.response, a.verdict) for a in own])
        answers = {
            i: answer for share, part in zip(shares, parts, strict=True) for i, answer in zip(share, part, strict=True)
        }
        return [Attempt(w.problem, w.view, *answers[i]) for i, w in enumerate(work)]

    def _own(self, work: Sequence[Work], sampling: Sampling, versions: Mapping[Adapter, int]) -> list[Attempt]:
        with self.around():
            requests = [Request(w.view, w.seed) for w in work]
            responses = self.engine.sample(requests, sampling, versions)
        self.tell(len(work), len(work), "responses, verifying them")
        with self.span("verify"):
            verdicts = (
                self.verifier.verify([(w.problem, r) for w, r in zip(work, responses, strict=True)]) if work else []
            )
        return [Attempt(w.problem, w.view, r, v) for w, r, v in zip(work, responses, verdicts, strict=True)]
