"""Parts of the real line: disjoint pieces in order, united, intersected and complemented exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cmp_to_key
from typing import Any, cast

import sympy

from past_opsd.rollout.verifiers._latex import INFINITY, UnreadError


@dataclass(frozen=True, slots=True)
class Piece:
    """From `low` to `high`; each end belongs to it or not. A point has both ends equal and closed."""

    low: sympy.Expr
    high: sympy.Expr
    low_in: bool
    high_in: bool


@dataclass(frozen=True, slots=True)
class Region:
    """Disjoint pieces in ascending order that do not touch."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, *pieces: Piece) -> Region:
        """The union of any pieces, in one form. Ends that are no numbers allow one piece only."""
        if len(pieces) == 1 and not (pieces[0].low.is_number and pieces[0].high.is_number):
            return cls(pieces)
        real = [_open_at_infinity(piece) for piece in pieces if not _is_empty(piece)]
        merged: list[Piece] = []
        for piece in sorted(real, key=cmp_to_key(_by_start)):
            if merged and _touch(merged[-1], piece):
                merged[-1] = _merge(merged[-1], piece)
            else:
                merged.append(piece)
        return cls(tuple(merged))

    def union(self, other: Region) -> Region:
        return Region.of(*self.pieces, *other.pieces)

    def complement(self) -> Region:
        gaps: list[Piece] = []
        low, low_in = -INFINITY, False
        for piece in self.pieces:
            gaps.append(Piece(low, piece.low, low_in, not piece.low_in))
            low, low_in = piece.high, not piece.high_in
        return Region.of(*gaps, Piece(low, INFINITY, low_in, False))

    def intersection(self, other: Region) -> Region:
        if self == EVERYTHING or other == EVERYTHING:
            return other if self == EVERYTHING else self
        return self.complement().union(other.complement()).complement()


def order(a: sympy.Expr, b: sympy.Expr) -> int:
    """-1, 0 or 1 as a is below, at or above b."""
    if a == b:
        return 0
    difference = a - b
    if difference.is_Rational or difference in (sympy.oo, -sympy.oo):
        return 1 if difference > 0 else -1
    if difference.is_zero:
        return 0
    value = cast(Any, sympy.N(difference, 15, maxn=200))
    if not value.is_extended_real:
        raise UnreadError("an end that is no real number")
    if abs(value) < sympy.Float("1e-80"):
        return 0
    return 1 if value > 0 else -1


def _is_empty(piece: Piece) -> bool:
    sign = order(piece.low, piece.high)
    return sign > 0 or (sign == 0 and not (piece.low_in and piece.high_in)) or (sign == 0 and not piece.low.is_finite)


def _open_at_infinity(piece: Piece) -> Piece:
    return Piece(
        piece.low, piece.high, piece.low_in and piece.low != -sympy.oo, piece.high_in and piece.high != sympy.oo
    )


def _by_start(a: Piece, b: Piece) -> int:
    return order(a.low, b.low) or b.low_in - a.low_in


def _touch(a: Piece, b: Piece) -> bool:
    sign = order(b.low, a.high)
    return sign < 0 or (sign == 0 and (a.high_in or b.low_in))


def _merge(a: Piece, b: Piece) -> Piece:
    sign = order(a.high, b.high)
    high, high_in = (
        (a.high, a.high_in) if sign > 0 else (b.high, b.high_in) if sign < 0 else (a.high, a.high_in or b.high_in)
    )
    return Piece(a.low, high, a.low_in, high_in)


def solve(left: sympy.Expr, sign: str, right: sympy.Expr, free: sympy.Basic) -> Region:
    """Where an inequality in one variable holds."""
    if left == free and not right.has(free):
        return _half(sign, right)
    if right == free and not left.has(free):
        return _half({"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(sign, sign), left)
    if sign in ("!=", "="):
        points = _from_sympy(cast(Any, sympy).solveset(left - right, free, sympy.S.Reals))
        return points.complement() if sign == "!=" else points
    relations: dict[str, Any] = {"<": sympy.Lt, ">": sympy.Gt, "<=": sympy.Le, ">=": sympy.Ge}
    relation = relations[sign](left, right)
    if relation in (sympy.true, sympy.false):
        return EVERYTHING if relation == sympy.true else NOTHING
    try:
        return _from_sympy(sympy.solve_univariate_inequality(relation, free, relational=False))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UnreadError("an inequality that cannot be solved") from error


def _half(sign: str, at: sympy.Expr) -> Region:
    oo = sympy.oo
    if sign in ("=", "!="):
        point = Region.of(Piece(at, at, True, True))
        return point if sign == "=" else point.complement()
    below = Piece(-oo, at, False, sign == "<=")
    return Region.of(below if sign[0] == "<" else Piece(at, oo, sign == ">=", False))


def _from_sympy(found: Any) -> Region:
    parts: Any = found.args
    if isinstance(found, sympy.Interval):
        return Region.of(Piece(parts[0], parts[1], not found.left_open, not found.right_open))
    if isinstance(found, sympy.FiniteSet):
        return Region.of(*(Piece(point, point, True, True) for point in parts))
    if isinstance(found, sympy.Union):
        return Region.of(*(piece for part in parts for piece in _from_sympy(part).pieces))
    if isinstance(found, sympy.Complement):
        return _from_sympy(parts[0]).intersection(_from_sympy(parts[1]).complement())
    if found == sympy.S.Reals:
        return EVERYTHING
    if found == sympy.S.EmptySet:
        return NOTHING
    raise UnreadError("a set of another kind")


NOTHING = Region(())
EVERYTHING = Region((Piece(-sympy.oo, sympy.oo, False, False),))
