r"""The phrase book of `word_problems`: who has what, and every sentence that can happen to it.

A phrase is a sentence of the problem and the sentence of the worked solution that goes with it. Fields:

    {Who} {who}     the holder, at the start of a sentence or inside
    {friend}        another person
    {count} {more}  "5 apples", "5 more apples"; {s} is "s" after one thing, "" after several
    {first}         "3 apples", where the count is the second of two
    {things} {thing} {box} {boxes} {k}     the nouns, and a bare number
    {times}         "twice", "3 times"
    {work}          the step, "12 + 5 = 17 apples"
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Aisha", "Amir", "Ana", "Ben", "Carla", "Chen", "Clara", "Daniel", "Diego", "Elena", "Emma", "Farid", "Grace",
    "Hana", "Hugo", "Ines", "Ivan", "Jamal", "Jonas", "Julia", "Kofi", "Lara", "Leo", "Lina", "Lucas", "Maya", "Mei",
    "Mila", "Nadia", "Noah", "Olga", "Omar", "Oscar", "Paula", "Priya", "Ravi", "Rosa", "Sam", "Sofia", "Tariq", "Tom",
    "Vera", "Yuki", "Zoe",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phrase:
    """What the problem says and what the worked solution says about it."""

    said: str
    worked: str


@dataclass(frozen=True, slots=True)
class Noun:
    """A countable thing."""

    one: str
    many: str

    def of(self, n: int) -> str:
        return self.one if n == 1 else self.many


@dataclass(frozen=True, slots=True)
class Scene:
    """Things that belong together. `holders` is empty where the holder is a person.

    Each ending asks the question; its working gives the final number. `unit` is what an ending counts.
    """

    name: str
    things: tuple[Noun, ...]
    boxes: tuple[Noun, ...]
    holders: tuple[str, ...]
    plain: tuple[str, ...]
    groups: tuple[Phrase, ...]
    both: tuple[Phrase, ...]
    gains: tuple[Phrase, ...]
    losses: tuple[Phrase, ...]
    times: tuple[Phrase, ...]
    shares: tuple[Phrase, ...]
    question: tuple[str, ...]
    end_products: tuple[tuple[Phrase, str], ...]
    end_quotients: tuple[tuple[Phrase, str], ...]
    end_sums: tuple[Phrase, ...]


def _nouns(text: str) -> tuple[Noun, ...]:
    """Nouns from "apple box/boxes": a plain s, or the plural after a slash."""
    pairs = (word.partition("/") for word in text.split())
    return tuple(Noun(one, many or f"{one}s") for one, _, many in pairs)


_LEFT = "That leaves {who} with {work}."
_TWO = "{Who} has two {boxes} with {first} in one and {count} in the other."
_NOW = "Now {who} has {work}."
_TIMES = (
    Phrase("{Who} adds to them until there are {times} as many {things} as before.", "Then there are {work}."),
    Phrase("A month later {who} has {times} as many {things} as before.", "A month later {who} has {work}."),
)
_SHARES = (
    Phrase(
        "{Who} divides all the {things} equally among {k} {boxes} and keeps only one {box}.",
        "One {box} holds {work}, and that is all {who} keeps.",
    ),
    Phrase("{Who} makes {k} equal piles of all the {things} and keeps only one pile.", "One pile has {work}."),
)
_HAS = ("{Who} has {count}.", "{Who} starts with {count}.", "At first {who} has {count}.")
_HOW_MANY = ("How many {things} does {who} have now?", "How many {things} does {who} have in the end?")
_MORE = (
    Phrase(
        "At this point {friend} has {more} than {who}. How many {things} does {friend} have?",
        "{friend} has {work}.",
    ),
)
_GIVE = (
    Phrase("{friend} gives {who} {more}.", "With the gift from {friend}, {who} has {work}."),
    Phrase("{Who} buys {more}.", "After buying, {who} has {work}."),
    Phrase("{Who} wins {more} at a fair.", _NOW),
    Phrase("{Who} gets {more} as a present.", "With the present, {who} has {work}."),
)
_LOSE = (
    Phrase("{Who} gives {count} to {friend}.", _LEFT),
    Phrase("{Who} loses {count} on the way home.", _LEFT),
    Phrase("{Who} sells {count} to {friend}.", "After the sale, {who} still has {work}."),
)
_SELL = (
    Phrase(
        "{Who} sells each {thing} for {k} dollars. How many dollars does {who} get for all of the {things}?",
        "For the {things} {who} gets {work}.",
    ),
    "dollar",
)
_AS_MANY = (
    Phrase(
        "At this point {friend} has {times} as many {things} as {who}. How many {things} does {friend} have?",
        "{friend} has {work}.",
    ),
    "",
)
_PACK = (
    Phrase(
        "{Who} puts all the {things} into {boxes}, {k} in each {box}. How many {boxes} does {who} fill?",
        "{Who} fills {work}.",
    ),
    "box",
)
_DEAL = (
    Phrase(
        "{Who} shares all the {things} equally among {k} children. How many {things} does each child get?",
        "Each child gets {work}.",
    ),
    "",
)
_GROUPS = (
    Phrase("{Who} buys {k} {boxes} with {count} in each {box}.", "{Who} starts with {work}."),
    Phrase("{Who} has {k} {boxes}. There are {count} in each {box}.", "In all the {boxes} {who} has {work}."),
)
_BOTH = (
    Phrase(_TWO, "In both, {who} has {work}."),
    Phrase("{Who} has {first} at home and {count} at school.", "Altogether {who} has {work}."),
)


def _person(name: str, things: str, boxes: str, gains: tuple[Phrase, ...], losses: tuple[Phrase, ...]) -> Scene:
    return Scene(
        name=name,
        things=_nouns(things),
        boxes=_nouns(boxes),
        holders=(),
        plain=_HAS,
        groups=_GROUPS,
        both=_BOTH,
        gains=_GIVE + gains,
        losses=_LOSE + losses,
        times=_TIMES,
        shares=_SHARES,
        question=_HOW_MANY,
        end_products=(_SELL, _AS_MANY),
        end_quotients=(_PACK, _DEAL),
        end_sums=_MORE,
    )


def _shop(name: str, things: str, boxes: str, holders: tuple[str, ...], made: str) -> Scene:
    return Scene(
        name=name,
        things=_nouns(things),
        boxes=_nouns(boxes),
        holders=holders,
        plain=("{Who} opens with {count}.", "In the morning {who} has {count}.", "{Who} has {count} to sell."),
        groups=(
            Phrase("{Who} gets {k} {boxes} with {count} in each {box}.", "{Who} starts with {work}."),
            Phrase("{Who} has {k} {boxes} with {count} in each {box}.", "In all the {boxes} there are {work}."),
        ),
        both=(Phrase("{Who} has {first} on display and {count} in store.", "Altogether {who} has {work}."),),
        gains=(
            Phrase("{Who} " + made + " {more}.", _NOW),
            Phrase("A delivery brings {more}.", "After the delivery, {who} has {work}."),
            Phrase("A helper carries in {more}.", _NOW),
        ),
        losses=(
            Phrase("{Who} sells {count}.", "After that sale, {who} has {work}."),
            Phrase("{friend} buys {count} there.", "After {friend} has paid, {who} has {work}."),
            Phrase("{Who} sends {count} to the school.", _LEFT),
        ),
        times=(Phrase("{Who} stocks up until it has {times} as many {things} as before.", _NOW),),
        shares=(
            Phrase(
                "{Who} divides all the {things} equally among {k} {boxes} and gives away all but one {box}.",
                "The {box} that is left holds {work}.",
            ),
        ),
        question=(*_HOW_MANY, "How many {things} are there at {who} now?"),
        end_products=(_SELL,),
        end_quotients=(
            (
                Phrase(
                    "{Who} puts all the {things} into {boxes}, {k} in each {box}. How many {boxes} does {who} fill?",
                    "{Who} fills {work}.",
                ),
                "box",
            ),
        ),
        end_sums=(
            Phrase(
                "The shop across the street has {more} than {who}. How many {things} does the shop across the street "
                "have?",
                "The shop across the street has {work}.",
            ),
        ),
    )


def _crowd(name: str, things: str, boxes: str, holders: tuple[str, ...], come: str, go: str) -> Scene:
    """People come and go."""
    return Scene(
        name=name,
        things=_nouns(things),
        boxes=_nouns(boxes),
        holders=holders,
        plain=("{Who} has {count}.", "In the morning {who} has {count}.", "At the start {who} has {count}."),
        groups=(Phrase("{Who} has {k} {boxes} with {count} in each {box}.", "At first {who} has {work}."),),
        both=(Phrase(_TWO, "At first {who} has {work}."),),
        gains=(
            Phrase("Soon {more} " + come + ".", _NOW),
            Phrase("A little later {more} " + come + ".", "That makes {work}."),
            Phrase("Some time later {more} " + come + ".", _NOW),
        ),
        losses=(
            Phrase("Soon {count} " + go + ".", _LEFT),
            Phrase("A little later {count} " + go + ".", _LEFT),
            Phrase("Some time later {count} " + go + ".", "Then {who} still has {work}."),
        ),
        times=(Phrase("{Who} fills up until it has {times} as many {things} as before.", "Then {who} has {work}."),),
        shares=(
            Phrase(
                "All the {things} form {k} equal groups, and only one group stays with {who}.",
                "The group that stays has {work}.",
            ),
        ),
        question=_HOW_MANY,
        end_products=(
            (
                Phrase(
                    "Each {thing} now pays {k} dollars. How many dollars do the {things} pay together?",
                    "Together they pay {work}.",
                ),
                "dollar",
            ),
        ),
        end_quotients=(
            (
                Phrase(
                    "All the {things} form {k} groups of the same size. How many {things} are in each group?",
                    "Each group has {work}.",
                ),
                "",
            ),
        ),
        end_sums=(
            Phrase("{Who} still has room for {more}. How many {things} can {who} hold?", "{Who} can hold {work}."),
        ),
    )


_MONEY = Scene(
    name="money",
    things=_nouns("dollar"),
    boxes=_nouns("envelope jar wallet"),
    holders=(),
    plain=(*_HAS, "{Who} has saved {count}."),
    groups=(
        Phrase("{Who} works for {k} hours and earns {count} in each hour.", "For the work {who} gets {work}."),
        Phrase("{Who} saves {count} a week for {k} weeks.", "After these weeks {who} has {work}."),
    ),
    both=(Phrase(_TWO, "In both, {who} has {work}."),),
    gains=(
        Phrase("{Who} earns {more} by washing cars.", "After the work {who} has {work}."),
        Phrase("{friend} gives {who} {more}.", "With the gift from {friend}, {who} has {work}."),
        Phrase("{Who} finds {more} in a coat.", _NOW),
    ),
    losses=(
        Phrase("{Who} spends {count} on lunch.", _LEFT),
        Phrase("{Who} buys a book for {count}.", "After paying for the book, {who} has {work}."),
        Phrase("{Who} gives {count} to {friend}.", _LEFT),
    ),
    times=(_TIMES[1],),
    shares=(_SHARES[0],),
    question=_HOW_MANY,
    end_products=(_AS_MANY,),
    end_quotients=(
        (
            Phrase(
                "{Who} spends everything on tickets that cost {k} dollars each. How many tickets does {who} buy?",
                "{Who} buys {work}.",
            ),
            "ticket",
        ),
        _DEAL,
    ),
    end_sums=_MORE,
)

SCENES = (
    _person(
        "food",
        "apple pear orange plum lemon muffin cookie pancake carrot tomato/tomatoes potato/potatoes egg cherry/cherries",
        "basket bag bowl box/boxes",
        (Phrase("{Who} brings {more} from the kitchen.", _NOW),),
        (Phrase("{Who} eats {count}.", _LEFT), Phrase("{Who} throws away {count} that went bad.", _LEFT)),
    ),
    _person(
        "treasures",
        "marble sticker stamp shell coin badge postcard button bead toy puzzle",
        "jar box/boxes tin drawer",
        (Phrase("{Who} finds {more} in an old chest.", "With the find, {who} has {work}."),),
        (Phrase("{Who} throws away {count} that broke.", _LEFT),),
    ),
    _person(
        "school",
        "pencil pen crayon notebook eraser ruler paintbrush/paintbrushes marker",
        "box/boxes bag pack case",
        (Phrase("A teacher hands {who} {more}.", _NOW),),
        (Phrase("{Who} uses up {count}.", "After that, {who} has {work}."),),
    ),
    _person(
        "garden",
        "rose tulip daisy/daisies lily/lilies sunflower seed bulb",
        "pot basket bucket tray",
        (Phrase("{Who} picks {more}.", "After picking, {who} has {work}."),),
        (Phrase("{Who} throws away {count} that dried out.", _LEFT),),
    ),
    _shop("bakery", "roll pie cake loaf/loaves bun", "tray box/boxes basket", ("the bakery", "the café"), "bakes"),
    _shop("books", "book atlas/atlases comic map", "box/boxes shelf/shelves crate", ("the bookshop",), "orders"),
    _shop("farm", "melon pumpkin cabbage onion", "crate sack box/boxes", ("the farm shop", "the market stall"), "gets"),
    _crowd("train", "passenger", "car", ("the train", "the tram"), "get{s} on", "get{s} off"),
    _crowd("ferry", "passenger", "cabin", ("the ferry", "the ship"), "come{s} aboard", "leave{s}"),
    _crowd("club", "member", "team", ("the chess club", "the swimming club", "the choir"), "join{s}", "leave{s}"),
    _crowd("museum", "visitor", "hall", ("the museum", "the library", "the gallery"), "come{s} in", "walk{s} out"),
    _MONEY,
)
