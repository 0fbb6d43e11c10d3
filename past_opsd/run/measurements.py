"""What `past probe` and `past shift` write, checked before anything is drawn from it: the file may be anybody's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from past_opsd.core.files import write_text
from past_opsd.core.nouns import PastError
from past_opsd.core.reading import ReadError, read_json

Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12)]
MOST_STEPS = 10**9


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Interval(_Part):
    estimate: Number
    low: Number
    high: Number


class _Estimate(_Part):
    """One problem alone has no interval."""

    estimate: Number
    low: Number | None
    high: Number | None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval with one end")
        return self


class _Metrics(_Part):
    success: _Estimate | None
    jsd_student: _Estimate | None
    kl: _Estimate | None


class _Condition(_Part):
    all: _Metrics


class _Conditions(_Part):
    matching: _Condition
    removed: _Condition
    shuffled: _Condition


class _Probe(_Part):
    step: int = Field(ge=0, lt=MOST_STEPS)
    conditions: _Conditions


class _Estimates(_Part):
    privileged: _Interval | None
    shift: _Interval | None
    surviving: _Interval | None
    value: _Interval | None


class _Shift(_Part):
    step: int = Field(ge=0, lt=MOST_STEPS)
    estimates: _Estimates


_KINDS: dict[str, type[_Part]] = {"probe": _Probe, "shift": _Shift}


def save(file: Path, result: Mapping[str, Any]) -> None:
    """Write as JSON."""
    write_text(file, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def load(file: Path, kind: str) -> dict[str, Any]:
    """Read what `save` wrote of a `kind`: "probe" or "shift"."""
    try:
        found = read_json(file)
        _KINDS[kind].model_validate(found)
    except ReadError as error:
        raise PastError(f"{error}; delete it and measure again") from None
    except (ValueError, OverflowError) as error:
        raise PastError(f"{file}: not a record of this package ({_told(error)}); delete it and measure again") from None
    return found


def _told(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
