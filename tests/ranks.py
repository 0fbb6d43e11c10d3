"""`past` as several processes: one interpreter imports everything once and forks the ranks of every launch.

Run as a script it reads one launch a line; `Launcher` is the test's side of it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 120.0


@dataclass
class Ended:
    """A launch after its last process: exit codes by rank, what each wrote, and the seconds it took."""

    codes: list[int]
    out: list[str]
    err: list[str]
    seconds: float

    @property
    def messages(self) -> list[str]:
        """What was said to a person, by whichever process."""
        return [text for text in "".join(self.err).split("past: ")[1:] if text]


class Launcher:
    """Starts ranks and waits for them."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
        )

    def __call__(self, size: int, *words: str, fault: dict[str, Any] | None = None, local: int | None = None) -> Ended:
        """`past words...`, or a script and its words, in `size` processes; `fault`: what goes wrong, see `_plant`.

        `local` is how many of them count as on one machine; by default all.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        log = self._folder / f"launch-{self._count}"
        log.mkdir()
        order: dict[str, Any] = {"size": size, "words": [str(w) for w in words], "fault": fault or {}}
        order["local"] = local or size
        order |= {"log": str(log), "environment": environment()}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        texts = [[(log / f"{rank}.{kind}").read_text() for rank in range(size)] for kind in ("out", "err")]
        return Ended(answer["codes"], texts[0], texts[1], answer["seconds"])

    def close(self) -> None:
        self._process.communicate("")


def environment() -> dict[str, str]:
    """The test's own, with what every launch has."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "PAST_LIFE": "off", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return os.environ | own


def _serve() -> None:

    for line in sys.stdin:
        order = json.loads(line)
        began = time.monotonic()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [_fork(order, rank, port) for rank in range(order["size"])]
        codes = _wait(children, order["fault"])
        print(json.dumps({"codes": codes, "seconds": time.monotonic() - began}), flush=True)


def _wait(children: list[int], fault: dict[str, Any]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT
    while len(codes) < len(children):
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            # As a launcher does when a process is lost: the others are asked to end.
            for other in children:
                if other != pid:
                    os.kill(other, signal.SIGTERM)
            others = [_code(os.waitpid(other, 0)[1]) for other in children if other != pid]
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return others
        if pid:
            codes[pid] = _code(status)
        elif time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
            deadline += LIMIT
        else:
            time.sleep(0.02)
    return [codes[child] for child in children]


def _code(status: int) -> int:
    return os.waitstatus_to_exitcode(status)


def _fork(order: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        size, local = order["size"], order["local"]
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank % local)}
        names |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}
        os.environ |= order["environment"] | names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{order['log']}/{rank}.{kind}", os.O_WRONLY | os.O_CREAT), number)
        from past_opsd.interface import cli

        if order["fault"].get("rank") == rank:
            _plant(order["fault"])
        try:
            code = _script(order["words"]) if order["words"][0].endswith(".py") else cli.main(order["words"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _script(words: list[str]) -> int:
    import runpy

    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _plant(fault: dict[str, Any]) -> None:
    """Make this rank fail: 'kill', 'stop' and 'interrupt' are signals to itself at a phase of a cycle."""
    import torch

    from past_opsd import learner
    from past_opsd.interface import ui
    from past_opsd.policy import fused
    from past_opsd.policy.model import Model
    from past_opsd.run import train

    kind = fault["kind"]
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
    if kind in signals:

        def phase(display: object, cycle: int, name: str) -> None:
            if [cycle, name] == fault["at"]:
                os.kill(os.getpid(), signals[kind])

        train.Silent.phase = phase
        ui.TrainDisplay.phase = phase
    elif kind == "nan":
        real = fused.run

        def run(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            result.values[0][0] = torch.nan
            return result

        fused.run = run
    elif kind == "bug":

        def gradient(*_: object) -> None:
            raise ZeroDivisionError("a planted bug")

        learner.Learner._gradient = gradient
    elif kind == "drift":
        bump = Model.bump

        def drift(model: Model, adapter: Any) -> None:
            with torch.no_grad():
                next(iter(model.parameters(adapter).values())).add_(1e-3)
            bump(model, adapter)

        Model.bump = drift
    else:
        raise ValueError(kind)


if __name__ == "__main__":
    _serve()
