"""Terms to micro-batches: which terms share a live forward, which forwards share a row, which rows go together.

Weights are fixed here, before the first forward, so micro-batches, their size, their padding and the number of
processes among which they are divided do not change the update.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from past_opsd.core.losses import Advantaged, Reduction, token_weights
from past_opsd.core.nouns import Adapter, Term, Tokens, View
from past_opsd.policy import packing
from past_opsd.policy.distributed import balance

Weighted = tuple[Term, float]
"""A term with its weight per token."""


@dataclass
class Path:
    """One live forward: a view along token ids, with every term that reads it."""

    live: View
    tokens: Tokens
    terms: list[Weighted] = field(default_factory=list[Weighted])

    def by_frozen(self) -> dict[tuple[View | None, float], list[Weighted]]:
        """Terms by (frozen view, temperature); terms without a frozen view ride along with those that have one."""
        found: dict[tuple[View | None, float], list[Weighted]] = defaultdict(list)
        for term, weight in self.terms:
            found[term.frozen, term.temperature].append((term, weight))
        for frozen, temperature in [key for key in found if key[0] is None]:
            hosts = [key for key in found if key[0] is not None and key[1] == temperature]
            if hosts:
                found[hosts[0]].extend(found.pop((frozen, temperature)))
        return dict(found)


def pulls(term: Term) -> bool:
    """Whether the term can have a gradient: neither its weight nor a policy gradient's advantage is exactly 0."""
    return term.weight != 0 and not (isinstance(term.loss, Advantaged) and term.loss.advantage == 0)


def gather_paths(terms: Sequence[Term], reduction: Reduction) -> list[Path]:
    """Terms grouped by live forward, with the per-token weights of the chosen reduction; weight 0 is left out."""
    weights: list[float] = [0.0] * len(terms)
    names: dict[str, list[int]] = defaultdict(list)
    for i, term in enumerate(terms):
        names[term.name].append(i)
    for members in names.values():
        lengths = [terms[i].supervised for i in members]
        per_token = token_weights(lengths, [terms[i].weight for i in members], reduction)
        for i, weight in zip(members, per_token, strict=True):
            weights[i] = weight
    paths: dict[tuple[View, Tokens, int], Path] = {}
    seen: Counter[tuple[View, Tokens, str]] = Counter()
    for term, weight in zip(terms, weights, strict=True):
        # The same response drawn twice is two paths: the n-th term of a name belongs to the n-th of them.
        copy = seen[term.live, term.tokens, term.name]
        seen[term.live, term.tokens, term.name] += 1
        if weight == 0:
            continue
        path = paths.setdefault((term.live, term.tokens, copy), Path(term.live, term.tokens))
        path.terms.append((term, weight))
    return list(paths.values())


@dataclass(frozen=True)
class Bundle:
    """Paths whose live forward is one row: a path alone, or several that begin alike."""

    paths: Sequence[Path]
    worth: int = 1
    """Positions that a segment of a shared row must save."""

    @cached_property
    def live(self) -> list[packing.Read]:
        """The row of the live forward."""
        return [(path.live, path.tokens) for path in self.paths]

    @cached_property
    def frozen(self) -> dict[Adapter, list[list[packing.Read]]]:
        """The rows of the frozen forwards: a row for several paths, as live; a row each where one path has several."""
        found: dict[Adapter, dict[packing.Read, None]] = defaultdict(dict)
        for path in self.paths:
            for term, _ in path.terms:
                if term.frozen is not None:
                    found[term.frozen.adapter][term.frozen, path.tokens] = None
        alone = len(self.paths) == 1
        return {adapter: [[r] for r in reads] if alone else [list(reads)] for adapter, reads in found.items()}

    @cached_property
    def width(self) -> int:
        """Tokens of the longest row, live or frozen."""
        return max(map(len, [self.tree, *self.frozen_trees]))

    @cached_property
    def tree(self) -> packing.Tree:
        """What the row of the live forward holds."""
        return packing.Tree(self.live, self.worth)

    @cached_property
    def frozen_trees(self) -> list[packing.Tree]:
        """What the rows of the frozen forwards hold."""
        return [packing.Tree(row, self.worth) for rows in self.frozen.values() for row in rows]

    @cached_property
    def height(self) -> int:
        """Rows of the largest forward."""
        return max([1, *map(len, self.frozen.values())])


def bundle(paths: Sequence[Path], token_budget: int, worth: int | None) -> list[Bundle]:
    """Paths that begin alike together where that pays; a row of several never exceeds the budget.

    `worth` is `Model.worth`, or None where no row may be shared.
    """
    if worth is None:
        return [Bundle([path]) for path in paths]
    order = {id(path): i for i, path in enumerate(paths)}
    forest = packing.Tree([(path.live, path.tokens) for path in paths], worth)
    groups: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(paths, key=lambda p: p.live.prompt + p.tokens):
        groups[forest.root((path.live, path.tokens))].append(path)
    made = [row for group in groups.values() for row in _divide(group, token_budget, worth)]
    return sorted(made, key=lambda b: order[id(b.paths[0])])


def _divide(paths: Sequence[Path], token_budget: int, worth: int) -> list[Bundle]:
    """As few rows as fit the budget, and these alike: the longest decides about the memory."""
    fewest = -(-Bundle(paths, worth).width // token_budget)
    for count in range(fewest, len(paths)):
        size = -(-len(paths) // count)
        rows = [Bundle(paths[i : i + size], worth) for i in range(0, len(paths), size)]
        several = [row for row in rows if len(row.paths) > 1]
        if not all(row.tree.pays for row in several):
            break
        if all(row.width <= token_budget for row in several):
            return rows
    return [Bundle([path], worth) for path in paths]


def micro_batches(bundles: Sequence[Bundle], token_budget: int) -> Iterator[list[Bundle]]:
    """Length-sorted batches whose padded size stays within the budget; a longer path goes alone, never cut."""
    widths, heights = [item.width for item in bundles], [item.height for item in bundles]
    for batch in packing.batches(widths, token_budget, heights):
        yield [bundles[i] for i in batch]


def plan(
    terms: Sequence[Term], reduction: Reduction, token_budget: int, worth: int | None, ranks: int
) -> list[list[list[Bundle]]]:
    """Every rank's micro-batches; all ranks know all of them."""
    paths = gather_paths(terms, reduction)
    # A row that holds more than its part of a rank's work would leave other ranks idle.
    limit = token_budget if ranks == 1 else min(token_budget, -(-sum(Bundle([p]).width for p in paths) // ranks))
    bundles = bundle(paths, limit, worth)
    chosen = balance([item.width * item.height for item in bundles], ranks)
    return [list(micro_batches([bundles[i] for i in own], token_budget)) for own in chosen]
