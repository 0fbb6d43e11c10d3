"""Which operations a computation makes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "linear"}


class Operations(TorchDispatchMode):
    """Counts the operations under it that compute, views and casts to what is there not, and products by dtype."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.products: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        self.count += name.endswith("_") or not _same_memory(out, args[0] if args else None)
        if name in PRODUCTS:
            self.products[args[0].dtype] += 1
        return out


def _same_memory(out, given) -> bool:
    both = isinstance(out, Tensor) and isinstance(given, Tensor)
    return both and out.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
