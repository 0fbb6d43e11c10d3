# pyright: standard
# vLLM pins a torch of its own and is not there where types are checked.
"""vLLM inside the trainer's process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from past_opsd.core.config import ModelSection, Sampling
from past_opsd.core.nouns import PastError
from past_opsd.rollout.engines.vllm_backend import (
    GREEDY,
    SEED,
    TOP,
    Draw,
    Drawn,
    Options,
    Served,
    arguments,
    environment,
    parameters,
)
from past_opsd.rollout.engines.vllm_sleep import UNABLE, Sleeper

if TYPE_CHECKING:
    from past_opsd.policy.distributed import World


class LocalBackend:
    """One vLLM engine of this process's own."""

    def __init__(
        self,
        options: Options,
        section: ModelSection,
        stop: Sequence[int],
        base: Served,
        bound: float,
        context: int,
        share: float,
        deep: int,
        world: World,
    ):
        self._stop = stop
        self._bound = bound
        self._alone = world.alone
        self._served: dict[int, Served] = {}
        self._requests: dict[int, Any] = {0: None}
        self._probed: list[float] = []
        chosen = {"max_model_len": context, "gpu_memory_utilization": share} | arguments(section, options)
        if not world.alone:
            chosen["distributed_executor_backend"] = "external_launcher"  # the GPU of LOCAL_RANK, and our channels
            for name, place in (("RANK", world.rank), ("LOCAL_RANK", world.local_rank)):
                os.environ.setdefault(name, str(place))
        os.environ.update(environment(section))
        # vLLM's engine core would otherwise start a process, where the trainer cannot see its errors.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its pages of settings would bury the run's own lines
        self.note = f"engine.sleep = 'auto': {UNABLE}; it stays awake" if options.sleep == "auto" and not deep else ""
        self._llm = _start(chosen | ({"enable_sleep_mode": True} if deep else {}))
        self._sleeper = Sleeper(self._llm, deep, self._again)
        try:
            self._probe(base)
        except (RuntimeError, ValueError) as error:
            raise PastError(f"vLLM started, but cannot run '{chosen['model']}': {error}") from error

    def sleep(self) -> None:
        self._sleeper.sleep()

    def wake(self) -> None:
        self._sleeper.wake()

    def hear(self, note: Callable[[str], None]) -> None: ...

    def load(self, served: Served) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        request = LoRARequest(served.name, served.number, str(served.folder))
        # vLLM hangs on the call after a generate() with an adapter it cannot load, so loading comes first.
        if not self._llm.llm_engine.add_lora(request):
            raise PastError(f"vLLM did not load {served.folder}; look at its messages above")
        self._served[served.number], self._requests[served.number] = served, request
        self._probe(served)

    def unload(self, served: Served) -> None:
        del self._served[served.number], self._requests[served.number]
        if not self._sleeper.asleep:  # only at the end is it asked so, and goes with its adapters
            self._llm.llm_engine.remove_lora(served.number)

    def draw(self, draws: Sequence[Draw], sampling: Sampling, top: int = 0) -> list[Drawn]:
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]

        settings = parameters(sampling, self._stop, top)
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(d.prompt)} for d in draws],
            [SamplingParams(**settings, detokenize=False, extra_args={SEED: str(d.seed)}) for d in draws],
            lora_request=[self._requests[d.served.number] for d in draws],
            use_tqdm=False,
        )
        return [_drawn(output.outputs[0]) for output in outputs]

    def metrics(self) -> dict[str, float]:
        probed, self._probed = self._probed, []
        return {"engine/probe_mean_abs": max(probed)} if probed else {}

    def close(self) -> None:
        from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        if self._alone:
            parallel_state.cleanup_dist_env_and_memory()
        else:
            parallel_state.destroy_model_parallel()  # the processes' own channels stay open

    def _again(self) -> None:
        """Weights that were read again have no adapters."""
        for served in list(self._served.values()):
            self.load(served)

    def _probe(self, served: Served) -> None:
        drawn = self.draw([Draw(served, probe.prompt, 0) for probe in served.probes], GREEDY, TOP)
        self._probed.append(served.check([d.top for d in drawn], self._bound, "vLLM in this process"))


def able() -> bool:
    """Whether this build of vLLM can sleep: its platform says so, and where that takes an allocator, it is built in."""
    _class()  # the message, where vLLM is not there
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_sleep_mode_available():
        return False
    return not current_platform.is_cuda_alike() or current_platform.is_cumem_allocator_available()


def _start(chosen: dict[str, Any]) -> Any:
    llm = _class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return llm(**chosen)
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise PastError(f"vLLM cannot serve '{chosen['model']}': {error}") from error


def _class() -> Any:
    """vLLM's engine, where vLLM is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise PastError(
                f"engine.name = 'vllm' needs vLLM ({error}): pip install 'past-opsd[vllm]'; see docs/vllm.md"
            ) from None
        return LLM


def _drawn(output: Any) -> Drawn:
    tokens = tuple(output.token_ids)
    values = tuple(entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True))
    return Drawn(tokens, values, {token: entry.logprob for token, entry in output.logprobs[0].items()})
