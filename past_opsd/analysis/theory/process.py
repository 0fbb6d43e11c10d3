"""Finite generation problems, small enough that every expectation of the theory is a sum over all trajectories.

A response is `horizon` actions from a vocabulary of V. Prefixes of length t are numbered 0 .. V^t - 1 so that prefix
h continued with action a is h V + a; a policy is a tuple over t of arrays [V^t, V]. A response that ends early is one
whose policy repeats an absorbing action.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from past_opsd.analysis.theory.finite import Floats, barycenter, distribution, kl
from past_opsd.core.nouns import PastError

Policy = tuple[np.ndarray, ...]
"""Float or, for a complex step, complex."""


def law(policy: Policy) -> np.ndarray:
    """The probability of every response [V^T]."""
    return _continuation(policy, 0, 0)


def occupancy(policy: Policy) -> list[np.ndarray]:
    """P(H_t = h) under the policy, one array [V^t] for each t."""
    reached = [np.ones(1)]
    for step in policy[:-1]:
        reached.append((reached[-1][:, None] * step).reshape(-1))
    return reached


def expected_reward(policy: Policy, verifier: Floats) -> float:
    """J(policy)."""
    return float(law(policy) @ verifier)


def action_values(policy: Policy, verifier: Floats) -> tuple[Floats, ...]:
    """Q(H, a): expected reward after action a at H with the policy thereafter; one array [V^t, V] for each t."""
    value, found = verifier, list[Floats]()
    for step in reversed(policy):
        found.append(value.reshape(step.shape))
        value = (step * found[-1]).sum(-1)
    return tuple(reversed(found))


def mix(a: Policy, b: Policy, epsilon: complex) -> Policy:
    """(1 - epsilon) a + epsilon b, the conservative interpolation of [eq:local-policy-improvement]."""
    return tuple((1 - epsilon) * x + epsilon * y for x, y in zip(a, b, strict=True))


def _continuation(policy: Policy, t: int, h: int) -> np.ndarray:
    """The law of everything after prefix h of length t, [V^(T-t)]."""
    found, first = np.ones(1), h
    for step in policy[t:]:
        found = (found[:, None] * step[first : first + len(found)]).reshape(-1)
        first *= step.shape[-1]
    return found


@dataclass(frozen=True)
class Cell:
    """One supervised prefix H_t = h that the student reaches, with everything the theory says about it.

    `mass` is P(H_t = h). The M privileges U that are possible here have `weights` P(U | H), `codes` for what the
    teacher reads of them, `targets` q_U(. | H) [M, V] and `success` P(R = 1 | U). `student` is p_k(. | H) and
    `values` Q_k(H, .), both [V].
    """

    t: int
    h: int
    mass: float
    weights: Floats
    codes: npt.NDArray[np.intp]
    targets: Floats
    success: Floats
    student: Floats
    values: Floats

    @property
    def mean(self) -> Floats:
        """[eq:causal-teacher-barycenter] qbar(. | H)."""
        return barycenter(self.targets, self.weights)

    @property
    def eta(self) -> float:
        """P(R = 0 | H)."""
        return float(self.weights @ (1.0 - self.success))

    def branch(self, correct: bool) -> Floats | None:
        """P(U | H, R), [M]; None where that outcome is impossible."""
        weights = self.weights * (self.success if correct else 1.0 - self.success)
        return weights / weights.sum() if weights.any() else None


@dataclass(frozen=True)
class Process:
    """A frozen student, a verifier and a privileged teacher.

    `verifier` [V^T] is the success probability of every response. The privilege U = (Y, Z) is a response of the
    student and a note Z with the law `notes` [K]; `reads` [V^T, K] numbers what the teacher makes of it, and
    `teacher` is a tuple over t of arrays [C, V^t, V]: a policy, over all prefixes, for each such number.
    """

    student: Policy
    verifier: Floats
    teacher: Policy
    reads: npt.NDArray[np.intp]
    notes: Floats

    def __post_init__(self) -> None:
        V, T, C = self.vocabulary, self.horizon, len(self.teacher[0])
        for t, (student, teacher) in enumerate(zip(self.student, self.teacher, strict=True)):
            if student.shape != (V**t, V) or teacher.shape != (C, V**t, V):
                raise PastError(f"process: step {t} has the shapes {student.shape} and {teacher.shape}, not [V^t, V]")
            distribution(student, f"student[{t}]")
            distribution(teacher, f"teacher[{t}]")
        distribution(self.notes, "notes")
        if self.verifier.shape != (V**T,) or not ((self.verifier >= 0) & (self.verifier <= 1)).all():
            raise PastError(f"process: the verifier gives a number in [0, 1] for each of {V**T} responses")
        if self.reads.shape != (V**T, len(self.notes)) or not ((self.reads >= 0) & (self.reads < C)).all():
            raise PastError(f"process: `reads` numbers one of {C} teachers for every response and note")

    @property
    def vocabulary(self) -> int:
        return self.student[0].shape[-1]

    @property
    def horizon(self) -> int:
        return len(self.student)

    @property
    def values(self) -> tuple[Floats, ...]:
        """Q_k, one array [V^t, V] for each t."""
        return action_values(self.student, self.verifier)

    def cells(self) -> Iterator[Cell]:
        """Every prefix with positive probability under the student's rollouts, by length."""
        joint = law(self.student)[:, None] * self.notes
        success = np.broadcast_to(self.verifier[:, None], joint.shape)
        for t, values in enumerate(self.values):
            weights, codes, outcomes = (x.reshape(len(values), -1) for x in (joint, self.reads, success))
            for h in np.flatnonzero(weights.sum(-1)):
                possible = weights[h] > 0
                mass, here = float(weights[h].sum()), codes[h, possible]
                yield Cell(
                    *(t, int(h), mass, weights[h, possible] / mass, here, self.teacher[t][here, h]),
                    *(outcomes[h, possible], self.student[t][h], values[h]),
                )

    def read_by(self, code: int) -> Policy:
        """The teacher's policy over all prefixes once it has read the privilege `code`."""
        return tuple(step[code] for step in self.teacher)

    def teacher_success(self) -> float:
        """E[V] when the teacher writes a whole response under the privilege of a student rollout."""
        joint = (law(self.student)[:, None] * self.notes).reshape(-1)
        mass = np.bincount(self.reads.reshape(-1), joint, len(self.teacher[0]))
        return float(sum(m * expected_reward(self.read_by(c), self.verifier) for c, m in enumerate(mass) if m > 0))

    def rewards(self, cell: Cell) -> Floats:
        """The verifier on every continuation of a prefix, [V^(T-t)]."""
        return self.verifier.reshape(self.vocabulary**cell.t, -1)[cell.h]

    def own_continuation(self, cell: Cell, code: int) -> Floats:
        """The law Q_U: the teacher writes on from H to the end."""
        return _continuation(self.read_by(code), cell.t, cell.h)

    def hybrid_continuation(self, cell: Cell, code: int) -> Floats:
        """The law M_U: the teacher takes one action at H, the student writes the rest."""
        steps = (*self.student[: cell.t], self.teacher[cell.t][code], *self.student[cell.t + 1 :])
        return _continuation(steps, cell.t, cell.h)

    def chained_kl(self, cell: Cell, code: int) -> float:
        """[eq:continuation-chain-rule-kl] the teacher's expected KL to the student over all positions after H."""
        teacher, total = self.read_by(code), 0.0
        reached, first = np.ones(1), cell.h
        for s in range(cell.t, self.horizon):
            rows = slice(first, first + len(reached))
            if s > cell.t:
                possible = reached > 0
                total += reached[possible] @ kl(teacher[s][rows][possible], self.student[s][rows][possible])
            reached = (reached[:, None] * teacher[s][rows]).reshape(-1)
            first *= self.vocabulary
        return float(total)


def keep_correct(process: Process) -> Process:
    """The same process with the correct branch at its ideal: q_U = p_k wherever the response Y is correct."""
    if not np.isin(process.verifier, (0.0, 1.0)).all():
        raise PastError("keep_correct: the branches are only apart when the verifier says 0 or 1")
    student = len(process.teacher[0])
    steps = zip(process.teacher, process.student, strict=True)
    reads = np.where(process.verifier[:, None] == 1, student, process.reads)
    return replace(process, teacher=tuple(np.concatenate([q, p[None]]) for q, p in steps), reads=reads)


def perfect_teacher(horizon: int) -> Process:
    """The construction of prop:perfect-teacher-no-transfer: fair bits, constant responses accepted, B = Y_T read."""
    if horizon < 2:
        raise PastError(f"perfect_teacher: the construction needs a horizon of at least 2, got {horizon}")
    prefixes = [2**t for t in range(horizon)]
    responses: int = 2**horizon
    verifier = np.zeros(responses)
    verifier[[0, -1]] = 1.0
    return Process(
        student=tuple(np.full((n, 2), 0.5) for n in prefixes),
        verifier=verifier,
        teacher=tuple(np.repeat(np.eye(2)[:, None], n, axis=1) for n in prefixes),
        reads=(np.arange(responses) % 2)[:, None],
        notes=np.ones(1),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """What `random_process` draws.

    `notes` is K. `sparse` gives student and teacher zeros, the teacher's support within the student's; `stop` makes
    action 0 absorbing; `graded` lets the verifier take any value in [0, 1]; `reach` in (0, 1] is how far the teacher
    may lie from the student.
    """

    vocabulary: int = 3
    horizon: int = 3
    notes: int = 2
    sparse: bool = False
    stop: bool = False
    graded: bool = False
    reach: float = 1.0


def random_process(rng: np.random.Generator, shape: Shape) -> Process:
    """A process whose teacher reads all of U: an independent policy for every response and note."""
    V, T = shape.vocabulary, shape.horizon
    responses: int = V**T
    privileges = responses * shape.notes
    student, teacher = list[Floats](), list[Floats]()
    for t in range(T):
        support = _support(rng, (V**t, V), shape.sparse)
        p = _draw(rng, support)
        q = _draw(rng, support & _support(rng, (privileges, V**t, V), shape.sparse, support))
        q = (1 - shape.reach) * p + shape.reach * q
        if shape.stop and t:
            ended = _ended(V, t)
            p[ended], q[:, ended] = np.eye(V)[0], np.eye(V)[0]
        student.append(p)
        teacher.append(q)
    verifier = rng.random(responses) if shape.graded else (rng.random(responses) < 0.4).astype(np.float64)
    notes = rng.dirichlet(np.ones(shape.notes))
    reads = np.arange(privileges).reshape(-1, shape.notes)
    return Process(tuple(student), verifier, tuple(teacher), reads, notes)


def random_policy(rng: np.random.Generator, process: Process) -> Policy:
    """A prefix-only policy with full support."""
    return tuple(rng.dirichlet(np.ones(step.shape[-1]), len(step)) for step in process.student)


def _support(
    rng: np.random.Generator, shape: tuple[int, ...], sparse: bool, within: np.ndarray | None = None
) -> npt.NDArray[np.bool_]:
    """Which actions may have mass; one of those `within` always does."""
    if not sparse:
        return np.ones(shape, dtype=bool)
    keys = rng.random(shape) if within is None else np.where(within, rng.random(shape), -1.0)
    return (rng.random(shape) < 0.6) | (keys == keys.max(-1, keepdims=True))


def _draw(rng: np.random.Generator, support: np.ndarray) -> Floats:
    drawn = rng.standard_exponential(support.shape) * support
    return drawn / drawn.sum(-1, keepdims=True)


def _ended(V: int, t: int) -> np.ndarray:
    """Prefixes of length t that hold action 0."""
    prefixes: int = V**t
    digits = np.arange(prefixes)[:, None] // V ** np.arange(t) % V
    return (digits == 0).any(-1)
