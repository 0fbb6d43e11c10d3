"""What `past probe` and `past shift` wrote, checked before anything is drawn from it: the file may be anybody's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from past_opsd.reading import ReadError, read_json
from past_opsd.types import PastError

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


_KINDS: dict[str, type[_Part]] = {"step": _Probe, "shift": _Shift}


def load(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Boundary -> what was measured there; `kind` is "step" for `past probe` and "shift" for `past shift`."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((folder / "probes").glob(f"{kind}-*.json")):
        step = re.fullmatch(rf"{kind}-([0-9]{{1,9}})", path.stem)
        try:
            record = read_json(path)
            if step is None:
                raise ValueError("its name does not end in a step")
            _KINDS[kind].model_validate(record)
        except ReadError as error:
            raise PastError(f"{error}; delete it and measure again") from None
        except (ValueError, OverflowError) as error:
            raise PastError(
                f"{path}: not a record of this package ({_told(error)}); delete it and measure again"
            ) from None
        found[int(step[1])] = record
    return found


def _told(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:200]
