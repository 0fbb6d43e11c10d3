"""The cycle of `loop.py` without its pauses: `rollout.stream = true`.

A response is verified when it ends. If it failed, its continuations are asked of the same engine while other responses
are still being decoded, or, where the engine decodes one adapter at a time, verified; what a continuation's verdict
asks for follows while others go on. The teacher's step begins when the last group is complete.

Nothing is decided here. What is drawn early is kept under its seed; the loop then does what it always does, with the
same seeds, and finds it drawn. So batch, groups, terms and steps are the loop's own, whatever came when.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from past_opsd.core.config import Sampling
from past_opsd.core.nouns import Attempt, Group, Response, Verdict, Work, derive_seed
from past_opsd.rollout.engines import Flow, Request, sent
from past_opsd.rollout.lab import Lab, share_out
from past_opsd.rollout.verifiers import Verifier
from past_opsd.run.loop import Cycle, Loop

TOGETHER = 16
"""Most responses of one call of the verifier; where a cycle is broken off, one call is waited for."""


Answer = tuple[Response, Verdict]


def why_not(lab: Lab) -> str:
    """Why cycles cannot stream here; empty where they can."""
    if not getattr(lab.engine, "streams", False):
        return "the engine gives its responses all at once"
    return "" if lab.world.alone or not getattr(lab.engine, "mixes", False) else "several processes share the servers"


class _MissingError(Exception):
    """Draws that a group asks for and that are not there yet."""

    def __init__(self, work: Sequence[Work]):
        super().__init__()
        self.work = work


@dataclass
class Streaming(Loop):
    """The cycle, its responses drawn and verified in one stream."""

    _k: int | None = None  # the cycle that is under way
    _ready: dict[int, Answer] = field(default_factory=dict[int, Answer])  # what it has drawn, by seed
    _asking: bool = False  # a group is asked what it needs: nothing is drawn for it now

    def _cycle(self, k: int, phase: Callable[[str], None]) -> Cycle:
        self._k = None if why_not(self.lab) else k
        try:
            return super()._cycle(k, phase)
        finally:
            self._k = None
            self._ready.clear()

    @property
    def _singly(self) -> bool:
        """Whether a failed response's group can begin before the batch is known."""
        return self._k is not None and self.method.singly and not self.rollout.dynamic_rounds

    def _explore(self, k: int, failed: Sequence[Attempt]) -> list[Group]:
        each = [failed[: i + 1] for i in range(len(failed))] if self._singly else []
        if not each or any(self.needs(k, some) for some in each):
            return super()._explore(k, failed)
        return [group for some in each for group in self._group(k, some)]

    def _group(self, k: int, failed: Sequence[Attempt]) -> list[Group]:
        """The group of the last of these failures."""
        draw, last = self._draw(k, failed), len(failed) - 1
        return self.method.explore(failed[last:], lambda wanted: draw([(last, index) for _, index in wanted]))

    def needs(self, k: int, failed: Sequence[Attempt]) -> Sequence[Work]:
        """What the group of the last of these failures asks for and does not have."""
        self._asking = True
        try:
            self._group(k, failed)
        except _MissingError as missing:
            return missing.work
        finally:
            self._asking = False
        return []

    def drawn(self, work: Work) -> Attempt | None:
        """The attempt, once it is verified."""
        answer = self._ready.get(work.seed)
        return None if answer is None else Attempt(work.problem, work.view, *answer)

    def opens(self, attempt: Attempt) -> bool:
        """Whether the loop will explore it: it failed, and there is room to read it and to continue."""
        needed = max(len(attempt.response.tokens), self.rollout.teacher.max_new_tokens)
        return not attempt.verdict.correct and self._room(attempt) >= needed

    def _attempt(self, work: Sequence[Work], sampling: Sampling) -> list[Attempt]:
        if self._k is None:
            return super()._attempt(work, sampling)
        missing = [w for w in work if w.seed not in self._ready]
        if missing and self._asking:
            raise _MissingError(missing)
        if missing:
            self._ready |= self._shared(self._k, missing, sampling)
        return [Attempt(w.problem, w.view, *self._ready[w.seed]) for w in work]

    def _shared(self, k: int, work: Sequence[Work], sampling: Sampling) -> dict[int, Answer]:
        """What the processes drew and verified, each a share of the work and what follows from it."""
        world = self.lab.world
        world.agree("batch of requests", derive_seed(*(w.seed for w in work)))
        own = [work[i] for i in share_out(work, world.size, sampling.max_new_tokens)[world.rank]]
        begins = self._singly and work[0].view.adapter == "student"
        with self.lab.around():
            drawn = self._stream(own, sampling, _Groups(self, k, work, own) if begins else None) if own else {}
        return {seed: answer for part in world.gather(drawn) for seed, answer in part.items()}

    def _stream(self, work: Sequence[Work], sampling: Sampling, groups: _Groups | None) -> dict[int, Answer]:
        """Draw and verify the work, and what follows from it."""
        engine: Any = self.lab.engine
        asked, decoding = list(work), set(range(len(work)))
        few = 0  # when no more are decoded, verdicts are waited for, and what follows from them enters together
        first = [(Request(w.view, w.seed), sampling) for w in work]
        with (
            closing(_Verdicts(self.lab.verifier, self.lab.span)) as verdicts,
            closing(cast(Flow, engine.stream(first, self.learner.versions))) as flow,
        ):
            ended = next(flow)
            while True:
                for place, response in ended:
                    decoding.remove(place)
                    verdicts.ask(asked[place], response)
                found: list[tuple[Work, Answer]] = []
                if engine.mixes:
                    found = verdicts.take(0 if decoding else 1)
                elif len(decoding) <= few:
                    found = verdicts.take(verdicts.open)
                self._ready |= {w.seed: answer for w, answer in found}
                more = [w for done, _ in found for w in groups.after(done)] if groups else []
                if more:
                    decoding |= set(range(len(asked), len(asked) + len(more)))
                    asked += more
                    few = len(decoding) // 2
                if decoding:
                    ended = flow.send([(Request(w.view, w.seed), self.rollout.teacher) for w in more])
                elif verdicts.open:
                    ended = []
                else:
                    sent(flow, ())  # so that the engine ends in peace
                    return {w.seed: self._ready[w.seed] for w in asked}


class _Groups:
    """What follows from a verdict: a failed response's first continuations, and what its group asks for then."""

    def __init__(self, loop: Streaming, k: int, work: Sequence[Work], own: Sequence[Work]):
        self._loop, self._k = loop, k
        # Of each problem, its responses that are not looked at yet, and its failures. The seeds of a failure's draws
        # count the failures before it, so responses are looked at in order, and only where all of them are drawn here.
        mine = {w.seed for w in own}
        self._problems: dict[str, tuple[deque[Work], list[Attempt]]] = {}
        for w in work:
            self._problems.setdefault(w.problem.id, (deque(), []))[0].append(w)
        for responses, _ in self._problems.values():
            if not all(w.seed in mine for w in responses):
                responses.clear()
        self._left: dict[int, tuple[list[Attempt], set[int]]] = {}
        """Of each draw under way, whose group it is for, and the draws that this group waits for."""

    def after(self, done: Work) -> list[Work]:
        """The continuations to draw now that this work is verified."""
        if done.seed in self._left:
            failed, left = self._left.pop(done.seed)
            left.remove(done.seed)
            return [] if left else self._ask(failed)
        responses, failed = self._problems[done.problem.id]
        more: list[Work] = []
        while responses and (first := self._loop.drawn(responses[0])):
            responses.popleft()
            if self._loop.opens(first):
                failed.append(first)
                more += self._ask([*failed])
        return more

    def _ask(self, failed: list[Attempt]) -> list[Work]:
        work = self._loop.needs(self._k, failed)
        left = {w.seed for w in work}
        self._left |= dict.fromkeys(left, (failed, left))
        return list(work)


class _Verdicts:
    """Verdicts beside decoding, in the order of asking: from another thread where the verifier computes elsewhere.

    One that computes in this process is asked when verdicts are waited for, in this thread. The queues hold no more
    than a cycle's responses, which are in memory anyway.
    """

    def __init__(self, verifier: Verifier, span: Callable[[str], AbstractContextManager[None]]):
        self.open = 0
        """Asked for and not taken."""
        self._verifier, self._span = verifier, span
        self._asked: queue.SimpleQueue[tuple[Work, Response] | None] = queue.SimpleQueue()
        self._given: queue.SimpleQueue[tuple[Work, Answer] | BaseException] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None
        if getattr(verifier, "apart", False):
            self._thread = threading.Thread(target=self._work, name="past-verify", daemon=True)
            self._thread.start()

    def ask(self, work: Work, response: Response) -> None:
        """Have a response verified."""
        self.open += 1
        self._asked.put((work, response))

    def take(self, least: int) -> list[tuple[Work, Answer]]:
        """What is verified: so many at least, and what more there is."""
        found: list[tuple[Work, Answer]] = []
        with self._span("verify") if least else nullcontext():
            if self._thread is None:
                self._verify(self._waiting())
            while len(found) < least or not self._given.empty():
                given = self._given.get()
                if isinstance(given, BaseException):
                    raise given
                found.append(given)
                self.open -= 1
        return found

    def close(self) -> None:
        """End the thread, after the call of the verifier that is under way."""
        self._closed = True
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closed and (first := self._asked.get()) is not None:
                self._verify([first, *self._waiting(TOGETHER - 1)])
        except BaseException as error:  # raised where verdicts are taken
            self._given.put(error)

    def _waiting(self, most: int | None = None) -> list[tuple[Work, Response]]:
        """What waits for a verdict, so many of it at most."""
        out: list[tuple[Work, Response]] = []
        with suppress(queue.Empty):
            while (most is None or len(out) < most) and (item := self._asked.get_nowait()) is not None:
                out.append(item)
        return out

    def _verify(self, items: Sequence[tuple[Work, Response]]) -> None:
        verdicts = self._verifier.verify([(w.problem, response) for w, response in items]) if items else []
        for (w, response), verdict in zip(items, verdicts, strict=True):
            self._given.put((w, (response, verdict)))
