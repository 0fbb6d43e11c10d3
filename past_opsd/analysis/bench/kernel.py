"""`past bench kernel`: the loss kernel compiled for three generations of GPUs, which needs none.

A GPU hides the latency of its memory by having many bytes under way: on an SM as many as its programs' blocks hold. How
many programs fit is decided by their registers; a spill moves registers to memory and costs more than it frees.
"""

# pyright: standard
# Triton's compiler has no types.

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from past_opsd.analysis.bench import LOSSES
from past_opsd.core.losses import (
    GeneralizedJSD,
    Imitate,
    Loss,
    Match,
    ModulatedReinforce,
    Reinforce,
    SampledMatch,
    SampledStay,
    Stay,
)
from past_opsd.core.nouns import PastError

ARCHITECTURES = {80: "A100", 90: "H100", 100: "B200"}
REGISTERS, WARPS, PROGRAMS = 65536, 64, 32  # of an SM, on all three
RIVALS = ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16), (4096, 8), (4096, 16), (8192, 16))
VOCABULARY = 151_936
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes: registers of a thread, bytes of stack of a thread (what is spilled), programs on an SM."""

    registers: int
    spilled: int
    programs: int


def jobs(name: str) -> list[tuple[Loss, bool]]:
    """Losses that are computed together, each with whether it reads the frozen view."""
    tokens = [(Reinforce(1.0), True), (ModulatedReinforce(1.0), True), (SampledStay(), True), (SampledMatch(), True)]
    tokens += [(Imitate(), False)]
    divergences = [(Match(0.05), True), (Stay(0.05), True), (GeneralizedJSD(0.3, 0.05), True)]
    found = dict(zip(LOSSES, ([loss] for loss in divergences), strict=False))
    found |= {"tokens": tokens, "teacher": [(Reinforce(1.0), False), (Stay(), True)], "watching": []}
    return (found | {"every": divergences + tokens})[name]


def compiled(name: str, dtype: str, arch: int, shape: tuple[int, int], biased: bool = False) -> Compiled:
    """The kernel as it is launched on Qwen3's vocabulary, with all diagnostics; `biased`: with biases, temperature."""
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from past_opsd.policy import fused_triton

    losses, (block, warps) = jobs(name), shape
    fixed: dict[str, Any] = fused_triton.constants(losses, diagnosed=True)
    fixed |= {
        "TEMPERATURE": 1.1 if biased else 1.0,
        "BLOCK": block,
        "FLOAT": tl.float64 if dtype == "fp64" else tl.float32,
    }
    reads = any(frozen for _, frozen in losses)
    fixed |= dict.fromkeys([] if reads else ["x", "x_bias"]) | dict.fromkeys([] if biased else ["z_bias", "x_bias"])
    kinds = dict.fromkeys(("z", "x", "out", "z_bias", "x_bias"), dtype) | {"tokens": "i64"}
    single = "fp64" if dtype == "fp64" else "fp32"
    kinds |= dict.fromkeys(("weights", "advantages", "values", "of_live", "diagnostics"), single)
    kernel: Any = fused_triton.kernel
    names: list[str] = kernel.arg_names
    signature = {n: "constexpr" if n in fixed else f"*{kinds[n]}" if n in kinds else "i32" for n in names}
    # As at a launch: torch's memory begins at multiples of 16, and so do rows of 151,936 entries.
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in fixed and n != "n"}
    source = ASTSource(kernel, signature, fixed, even)
    code = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    registers, spilled = _usage(code.asm["cubin"])
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * warps)  # a warp takes them in units of 256
    return Compiled(registers, spilled, min(by_registers, WARPS // warps, PROGRAMS))


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the assembler wrote them down."""
    from triton import knobs  # pyright: ignore[reportMissingImports]

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{what}:(\d+)", said)[0]) for what in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def run(args: argparse.Namespace) -> int:
    """Compile and print the table."""
    if importlib.util.find_spec("triton") is None:
        raise PastError("'past bench kernel' needs Triton's compiler: pip install 'past-opsd[triton]' (Linux)")
    from past_opsd.policy import fused_triton

    if fused_triton.INTERPRETED:
        raise PastError("'past bench kernel' compiles, and TRITON_INTERPRET is set; unset it")
    ours = fused_triton.shape(VOCABULARY)
    print(f"The kernel on {args.dtype} logits, losses: {args.loss}\n")
    print(f"{'GPU':<14}{'block x warps':<18}{'registers':>9}{'spilled B':>11}{'programs/SM':>13}{'KiB under way':>15}")
    for arch, gpu in ARCHITECTURES.items():
        for shape in RIVALS if args.rivals else (ours,):
            found = compiled(args.loss, args.dtype, arch, shape)
            kibibytes = found.programs * shape[0] * BYTES[args.dtype] / 1024
            mark = " *" if shape == ours else ""
            print(
                f"{f'sm_{arch} ({gpu})':<14}{f'{shape[0]} x {shape[1]}{mark}':<18}{found.registers:>9}"
                f"{found.spilled:>11}{found.programs:>13}{kibibytes:>15.0f}"
            )
    print("\n* is what is launched. KiB under way: of one view's logits, in the blocks of an SM's programs.")
    return 0
