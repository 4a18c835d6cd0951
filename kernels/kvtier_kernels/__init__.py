"""Moves KV blocks between an engine's layered block pool and block-first slots in host memory."""

from kvtier_kernels.base import KernelBackend
from kvtier_kernels.checks import Planes
from kvtier_kernels.errors import KernelError
from kvtier_kernels.planes import BlockPlanes
from kvtier_kernels.registry import backend_names, default_backend, get_backend

__all__ = [
    "BlockPlanes",
    "KernelBackend",
    "KernelError",
    "Planes",
    "backend_names",
    "default_backend",
    "get_backend",
]
