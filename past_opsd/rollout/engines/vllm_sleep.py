"""vLLM beside the trainer on one GPU: asleep while optimizer steps run, so that its memory is theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from past_opsd.core.lazy import Lazy
from past_opsd.core.nouns import PastError

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch")

Wish = Literal["none", "auto", "keep", "drop"]
LEVELS: dict[Wish, int] = {"none": 0, "auto": 1, "keep": 1, "drop": 2}
"""vLLM's own numbers: at 1 the weights wait on the host, at 2 they are given up and read again."""
UNABLE = "this build of vLLM cannot sleep (it can on GPUs)"


def level(wish: Wish, able: Callable[[], bool]) -> int:
    """How deep vLLM sleeps, 0 for not at all; `able` is asked of its build only where somebody wants it to."""
    if not LEVELS[wish] or able():
        return LEVELS[wish]
    if wish != "auto":
        raise PastError(f"engine.sleep = '{wish}': {UNABLE}; use 'auto', which goes on without, or 'none'")
    return 0


class Sleeper:
    """Puts one vLLM engine to sleep and wakes it; at level 0 it stays awake."""

    def __init__(self, llm: Any, level: int, restore: Callable[[], None]):
        self._llm = llm
        self._level = level
        self._restore = restore
        self.asleep = False

    def sleep(self) -> None:
        """Give the memory back; vLLM forgets its prefix cache with the keys and values."""
        if self._level and not self.asleep:
            self._llm.sleep(level=self._level)
            self.asleep = True

    def wake(self) -> None:
        """Take memory again; weights that were given up are read again, and `restore` brings the adapters back."""
        if not self.asleep:
            return
        torch.cuda.empty_cache()  # what the trainer's allocator only keeps for its next step
        if self._level == LEVELS["drop"]:
            self._llm.wake_up(tags=["weights"])
            self._llm.collective_rpc("reload_weights")  # in their place, before keys and values take what is free
            self._llm.wake_up(tags=["kv_cache"])
        else:
            self._llm.wake_up()
        self.asleep = False
        if self._level == LEVELS["drop"]:
            self._restore()
