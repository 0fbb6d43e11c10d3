"""Several processes as one run: who this one is, what all of them know, and how all of them end.

`torchrun` and `accelerate launch` set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; `core/launch.py` makes
them of what `srun` sets. The adapters are replicated, so data parallelism is adding up their gradients once a step, in
one buffer; plain objects (sampled ids, verdicts, logs) go over gloo, tensors on GPUs over nccl. A world of one does
nothing anywhere.

torchrun starts all processes again where one was lost, and its store stays: what one start writes the next one finds.
So every start meets under a name of its own, and what a job has begun is kept beside.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from past_opsd.core import launch
from past_opsd.core.nouns import PastError

T = TypeVar("T")

JOINING = 600.0
"""Seconds for all processes to start and import."""
LAST_WORDS = 3.0
"""Seconds in which the ranks that are left report themselves, once one was lost."""
_IMPORT = secrets.token_hex(8)


class PeerError(PastError):
    """Another process is gone or did not answer: this one only heard of it."""


class World:
    """This process among its peers; every operation must be called by all of them in the same order."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        store: Any = None,
        end: _End | None = None,
        job: _Job | None = None,
    ):
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = local_rank, local_size
        self.end = end
        self._store = store
        self._job = job
        self._timeout = 0.0

    @property
    def alone(self) -> bool:
        """One process: nothing to exchange."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """The one process that writes files and talks."""
        return self.rank == 0

    @property
    def restarted(self) -> bool:
        """The launcher started this job before, and now again."""
        return self._job is not None and self._job.restarted

    def begun(self, name: str) -> bool:
        """Whether an earlier start of this job began this."""
        job = self._job
        return job is not None and self.share(lambda: job.begun(name))

    def begin(self, name: str) -> None:
        """Keep for later starts of this job that it began this."""
        if self._job is not None and self.first:
            self._job.begin(name)

    def connect(self, timeout_seconds: float) -> None:
        """Open the channels; afterwards waiting longer than so many seconds for the others is an error."""
        if self.alone:
            return
        self._timeout = timeout_seconds
        if dist.is_initialized():  # by the script that runs us, whose channels do as well
            return
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        store = PrefixStore("group", self._store)
        limit = timedelta(seconds=timeout_seconds)
        self._together(
            lambda: dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        )

    def gather(self, item: T) -> list[T]:
        """Every rank's item, in the order of the ranks."""
        if self.alone:
            return [item]
        out: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(out, item))
        return out

    def share(self, make: Callable[[], T]) -> T:
        """What the first rank made; the others do not make it."""
        if self.alone:
            return make()
        box: list[Any] = [make() if self.first else None]
        self._together(lambda: dist.broadcast_object_list(box, src=0))
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag if self.alone else any(self.gather(flag))

    def agree(self, what: str, value: object) -> None:
        """Refuse to go on where the ranks have different values."""
        values = self.gather(value)
        odd = [rank for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise PastError(
                f"rank {odd[0]} has another {what} than rank 0 ({values[odd[0]]!r} and {values[0]!r}); every process "
                "needs the same recipe, model, data, package versions and kind of device"
            )

    def give(self, tensors: Iterable[Tensor]) -> None:
        """The first rank's values to all, in place and one after the other: no copy of all of them stands anywhere."""
        if not self.alone:
            for tensor in tensors:
                self._together(lambda tensor=tensor: cast(Any, dist).broadcast(tensor, src=0))

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Add up every rank's tensors, in place and in one float32 buffer."""
        if self.alone:
            return
        flat = torch.cat([tensor.detach().flatten().float() for tensor in tensors])
        self._together(lambda: cast(Any, dist).all_reduce(flat))
        for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def _together(self, action: Callable[[], object]) -> None:
        try:
            action()
        except RuntimeError as error:  # gloo's faults have no type of their own
            if "imed out" in str(error) or "imeout" in str(error):
                raise PeerError(
                    f"rank {self.rank} waited {self._timeout:g} s for the others (distributed.timeout_seconds)"
                ) from None
            raise PeerError(f"rank {self.rank} lost its connection to the others ({error})") from None


def balance(costs: Sequence[float], size: int) -> list[list[int]]:
    """Items over `size` ranks with nearly the same cost each: the dearest first, always to the least loaded rank."""
    loads = [0.0] * size
    out: list[list[int]] = [[] for _ in range(size)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = loads.index(min(loads))
        loads[rank] += costs[i]
        out[rank].append(i)
    return [sorted(own) for own in out]


@contextmanager
def joined(advice: Callable[[], str] = lambda: "") -> Generator[World]:
    """The world that the environment describes; whatever ends one process ends all, with one message.

    `advice` is asked at such an end for what a person should do next.
    """
    world = join(advice)
    with together(world):
        yield world
        if dist.is_initialized():
            dist.destroy_process_group()


def join(advice: Callable[[], str] = lambda: "") -> World:
    """The world that the environment describes, once every process is there; a process joins once."""
    launch.settle()
    size = _variable("WORLD_SIZE", 1)
    if size == 1 and not launch.keeps_a_store():
        return World()
    if size == 1:
        common, _ = _reach(size)
        new = _is_new(common)
        return World(job=_job(common, new, launch.restarted() or not new))
    store, rank, job = _meet(size)
    end = _End(store, rank, size, advice)
    end.listen()
    return World(rank, size, _variable("LOCAL_RANK", rank), _variable("LOCAL_WORLD_SIZE", size), store, end, job)


@contextmanager
def together(world: World) -> Generator[None]:
    """Whatever ends one process in here ends all, with one message."""
    if world.end is None:
        yield
        return
    if world.end.over:
        raise PastError("the processes of this run have ended with an error; start them again")
    try:
        yield
    except KeyboardInterrupt:
        if world.first:
            raise
        raise SystemExit(130) from None
    except Exception as error:
        text = world.end.last_words(error)
        if text is None:
            raise SystemExit(2) from None
        raise PastError(text) from None


def _meet(size: int) -> tuple[Any, int, _Job]:
    """A store that is this start's alone, once every process is there; and what the job has kept."""
    common, rank = _reach(size)
    try:
        store, new = _fresh(common, rank), rank == 0 and _is_new(common)
        if launch.restarted() or (rank == 0 and not new):  # machines may have counted different starts
            store.set("restarted", "")
        store.set(f"joined/{rank}", socket.gethostname())
        if rank == 0:
            _call_together(store, common, size)
        store.wait([f"joined/{other}" for other in range(size)])
        return store, rank, _job(common, new, store.check(["restarted"]))
    except RuntimeError as error:
        raise _apart(size, error) from None


def _reach(size: int) -> tuple[Any, int]:
    """The launcher's store, for what all starts of a job share."""
    try:
        if dist.is_initialized():
            store, rank = cast(Any, distributed_c10d)._get_default_store(), dist.get_rank()
        else:
            store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOINING)))
        store.set_timeout(timedelta(seconds=JOINING))
    except (RuntimeError, ValueError) as error:
        raise _apart(size, error) from None
    return PrefixStore("past", store), rank


def _apart(size: int, error: Exception) -> PastError:
    return PastError(
        f"WORLD_SIZE is {size}, but the processes cannot find each other ({error}); start them with torchrun, "
        "'accelerate launch' or srun, or unset WORLD_SIZE for one process"
    )


def _fresh(common: Any, rank: int) -> Any:
    """A part of the store that the first process has just named: others call it, and it answers."""
    call = secrets.token_hex(8)
    common.set(f"call/{rank}", call)
    return PrefixStore(call if rank == 0 else common.get(f"answer/{call}").decode(), common)


def _call_together(store: Any, common: Any, size: int) -> None:
    """Tell the others where to meet, until all have come; a call may be one that an earlier start has left."""
    name, deadline = common.get("call/0").decode(), time.monotonic() + JOINING
    while not store.check([f"joined/{other}" for other in range(size)]) and time.monotonic() < deadline:
        for other in range(1, size):
            if common.check([f"call/{other}"]):
                common.set(f"answer/{common.get(f'call/{other}').decode()}", name)
        time.sleep(0.02)


def _me() -> str:
    """This process, for other starts of its job."""
    return f"{socket.gethostname()} {os.getpid()} {_IMPORT}"


def _is_new(common: Any) -> bool:
    """Whether no earlier start has seen this store."""
    return common.compare_set("first", "", _me()).decode() == _me()


def _job(common: Any, new: bool, restarted: bool) -> _Job:
    # A launcher's store that is new at a later start took the place of one that went with its machine.
    return _Job(common, restarted, lost=new and restarted and launch.keeps_a_store())


class _Job:
    """What the starts of one job leave for each other in the launcher's store; the first process writes and reads."""

    def __init__(self, store: Any, restarted: bool, lost: bool):
        self.restarted = restarted
        self._store = store
        self._lost = lost  # that there was a start is all that is known

    def begun(self, name: str) -> bool:
        key = f"begun/{name}"
        return self._lost or (self._store.check([key]) and self._store.get(key).decode() != _me())

    def begin(self, name: str) -> None:
        self._store.set(f"begun/{name}", _me())


def _variable(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise PastError(f"the environment variable {name} = '{os.environ[name]}' is not a number") from None


class _End:
    """How one process's end becomes everybody's, told once.

    A rank that fails by itself speaks at once. Where a rank is lost, those that are left report themselves, and the
    lowest of them speaks. All of it goes through the launcher's store, which outlives broken connections.
    """

    def __init__(self, store: Any, rank: int, size: int, advice: Callable[[], str]):
        self._store, self._rank, self._size = store, rank, size
        self._advice = advice
        self._once = threading.Lock()

    @property
    def over(self) -> bool:
        """This process has said or kept its last words."""
        return self._once.locked()

    def last_words(self, error: BaseException | None) -> str | None:
        """The message, where it is this rank's to say; `error` is None when a signal asked to end."""
        self._once.acquire()  # never released: whoever ends this process ends it alone
        own = error is not None and not _heard(error)
        try:
            self._store.set(f"ended/{self._rank}", "")
            present = [self._rank] if own else self._wait("ended", range(self._size))
            speaks = (own or self._rank == min(present)) and self._store.add("spoken", 1) == 1
            self._leave(present, own)
        except RuntimeError:  # the store lived in rank 0 and went with it
            present = [rank for rank in range(self._size) if rank != 0]
            speaks = own or self._rank == 1
        return self._message(error if own else None, present, error) if speaks else None

    def _wait(self, what: str, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that report so within a while; fewer once somebody spoke for all."""
        deadline = time.monotonic() + LAST_WORDS
        while True:
            present = [rank for rank in ranks if self._store.check([f"{what}/{rank}"])]
            spoken = what == "ended" and self._store.check(["spoken"])
            if len(present) == len(ranks) or spoken or time.monotonic() > deadline:
                return present
            time.sleep(0.02)

    def _leave(self, present: Sequence[int], own: bool) -> None:
        """Go when nobody needs this rank any more: without a launcher's store, rank 0 holds it for all."""
        self._store.set(f"left/{self._rank}", "")
        if self._rank != 0 or launch.keeps_a_store():
            return
        if own and dist.is_initialized() and not torch.cuda.is_available():
            dist.destroy_process_group()  # the others wait for this rank, and hear so that they need not
        self._wait("left", range(self._size) if own else present)

    def _message(self, own: BaseException | None, present: list[int], heard: BaseException | None) -> str:
        silent = [str(rank) for rank in range(self._size) if rank not in present]
        if isinstance(own, PastError):
            text = str(own)
        elif own is not None:
            text = f"rank {self._rank} of {self._size} failed:\n{''.join(traceback.format_exception(own)).rstrip()}"
        elif silent:
            ranks = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(silent)}"
            text = f"{ranks} of {self._size} ended without a word (killed, out of memory, or its machine is gone)"
        else:
            text = "the processes were told to end (SIGTERM)" if heard is None else str(heard)
        advice = self._advice()
        return f"{text}\n{advice}" if advice else text

    def listen(self) -> None:
        """Answer SIGTERM from now on, as it does by itself: at once.

        A launcher that sees one process die sends it to the rest. They may be waiting for the dead one in a call that
        no handler can interrupt, so a thread answers.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        signal.signal(signal.SIGTERM, _ignored)
        signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(inbox,), daemon=True, name="past-sigterm").start()

    def _answer(self, inbox: socket.socket) -> None:
        with inbox:
            while received := inbox.recv(64):
                if signal.SIGTERM in received:
                    text = self.last_words(None)
                    if text is not None:
                        print(f"past: {text}", file=sys.stderr, flush=True)
                    os._exit(2)


def _heard(error: BaseException) -> bool:
    """Whether an error is only the echo of another rank's end; a sharded base's own exchanges raise torch's errors."""
    return isinstance(error, PeerError | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _ignored(*_: object) -> None: ...
