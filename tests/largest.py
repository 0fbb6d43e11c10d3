"""How large a tensor a computation makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The most bytes any tensor made under it has, the head's own views apart."""

    def __init__(self, head):
        super().__init__()
        self.head = head.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.head:
                self.bytes = max(self.bytes, tensor.nbytes)
        return out
