"""Sides in threads of this process: the same work without starting a process for each."""

from __future__ import annotations

import multiprocessing
import threading
from contextlib import suppress
from typing import Any

import pytest

from past_opsd.analysis.bench import _worker


class InThread(_worker.Side):
    def __init__(self, name: str, build: Any, *args: Any, environment: Any = None):
        self._name = name
        self._pipe, end = multiprocessing.Pipe()
        self._thread = threading.Thread(target=_run, args=(end, build, args), daemon=True)

    def ask(self, what: str, *args: Any) -> Any:
        if self._thread.ident is None:  # not before: loading models is not safe in two threads at once
            self._thread.start()
        return super().ask(what, *args)

    def close(self) -> None:
        self._pipe.close()
        if self._thread.ident is not None:
            self._thread.join()


def _run(*args: Any) -> None:
    with suppress(SystemExit):  # ends the process elsewhere
        _worker._main(*args)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> type[_worker.Side]:
    """`Side` for every benchmark."""
    from past_opsd.analysis.bench import scaling, shared, step

    for module in (step, shared, scaling):
        monkeypatch.setattr(module, "Side", InThread)
    return InThread
