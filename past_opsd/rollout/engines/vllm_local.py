# pyright: standard
# vLLM pins a torch of its own and is not there where types are checked.
"""vLLM inside the trainer's process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
    ):
        self._stop = stop
        self._bound = bound
        self._requests: dict[int, Any] = {0: None}
        self._probed: list[float] = []
        chosen = {"max_model_len": context, "gpu_memory_utilization": share} | arguments(section, options)
        os.environ.update(environment(section))
        # vLLM's engine core would otherwise start a process, where the trainer cannot see its errors.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its pages of settings would bury the run's own lines
        self._llm = _start(chosen)
        try:
            self._probe(base)
        except (RuntimeError, ValueError) as error:
            raise PastError(f"vLLM started, but cannot run '{chosen['model']}': {error}") from error

    def hear(self, note: Callable[[str], None]) -> None: ...

    def load(self, served: Served) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        request = LoRARequest(served.name, served.number, str(served.folder))
        # vLLM hangs on the call after a generate() with an adapter it cannot load, so loading comes first.
        if not self._llm.llm_engine.add_lora(request):
            raise PastError(f"vLLM did not load {served.folder}; look at its messages above")
        self._requests[served.number] = request
        self._probe(served)

    def unload(self, served: Served) -> None:
        del self._requests[served.number]
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
        from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()

    def _probe(self, served: Served) -> None:
        drawn = self.draw([Draw(served, probe.prompt, 0) for probe in served.probes], GREEDY, TOP)
        self._probed.append(served.check([d.top for d in drawn], self._bound, "vLLM in this process"))


def _start(chosen: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise PastError(
                f"engine.name = 'vllm' needs vLLM ({error}): pip install 'past-opsd[vllm]'; see docs/vllm.md"
            ) from None
        try:
            return LLM(**chosen)
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise PastError(f"vLLM cannot serve '{chosen['model']}': {error}") from error


def _drawn(output: Any) -> Drawn:
    tokens = tuple(output.token_ids)
    values = tuple(entry[token].logprob for entry, token in zip(output.logprobs, tokens, strict=True))
    return Drawn(tokens, values, {token: entry.logprob for token, entry in output.logprobs[0].items()})
