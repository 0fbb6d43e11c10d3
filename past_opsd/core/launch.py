"""Who started this process beside others: torchrun's variables, or SLURM's in their place.

`srun` starts the tasks of a step and numbers them; it sets nothing of what torch reads. A script that `sbatch` runs, or
a shell inside an allocation, is no such task, however many tasks the allocation is for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from past_opsd.core.nouns import PastError

PORTS = range(15000, 30000)
"""Below those that systems give to connections of their own."""


def settle(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch reads where SLURM alone has said it."""
    variables.update(slurm(variables))


def restarted(given: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun starts its processes again because one was lost; not where a machine came."""
    return given.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def restarts(given: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun will start its processes again where one is lost."""
    counts = [_number(given, f"TORCHELASTIC_{name}", default=0) for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return counts[0] < counts[1]


def keeps_a_store(given: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher holds a store for its processes that stays when they end."""
    return given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def slurm(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set for a task of `srun`.

    Empty where another launcher has set them, where there is one task, and outside of a step. The first process is on
    the step's first machine, wherever `srun` was called; MASTER_ADDR and MASTER_PORT win where they are set.
    """
    several = "SLURM_STEP_ID" in given and not {"RANK", "WORLD_SIZE"} & set(given)
    size = _number(given, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if several else 1
    if size == 1:
        return {}
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST") or ""
    address = given.get("MASTER_ADDR") or first_node(nodes) or given.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise PastError("SLURM_NTASKS says several tasks, but SLURM_JOB_NODELIST names no machine; set MASTER_ADDR")
    # Steps of one job that run side by side must not meet each other.
    place = _number(given, "SLURM_JOB_ID", default=0) + 101 * _number(given, "SLURM_STEP_ID", default=0)
    return {
        "RANK": str(_number(given, "SLURM_PROCID")),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(_number(given, "SLURM_LOCALID")),
        "LOCAL_WORLD_SIZE": str(_on_this_node(given, size)),
        "MASTER_ADDR": address,
        "MASTER_PORT": given.get("MASTER_PORT") or str(PORTS[place % len(PORTS)]),
    }


def first_node(nodes: str) -> str:
    """The first machine of a list as SLURM writes it: `node[01-03,7],other` begins with node01."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry[0]) if entry else ""


def _on_this_node(given: Mapping[str, str], size: int) -> int:
    """Tasks on this machine, of a list such as `4(x2),3` by machine."""
    text = given.get("SLURM_STEP_TASKS_PER_NODE") or given.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return size
    counts = [(int(n), int(times or 1)) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)]
    by_node = [n for n, times in counts for _ in range(times)]
    node = _number(given, "SLURM_NODEID", default=0)
    if node >= len(by_node):
        raise PastError(f"SLURM_NODEID = {node}, but SLURM_STEP_TASKS_PER_NODE = '{text}' counts fewer machines")
    return by_node[node]


def _number(given: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these variables that is set."""
    name = next((name for name in names if name in given), names[0])
    text = given.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d+", text):
        raise PastError(f"the environment variable {name} = '{text}' is not a number; start it with srun or torchrun")
    return int(text)
