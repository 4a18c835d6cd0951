"""Back ends by name, imported when asked for."""

from importlib import import_module

from kvtier_kernels.base import KernelBackend
from kvtier_kernels.errors import KernelError
from kvtier_kernels.planes import BlockPlanes

_NAME_TO_CLASS = {
    "reference": "kvtier_kernels.reference:ReferenceBackend",
    "numpy": "kvtier_kernels.numpy_backend:NumpyBackend",
    "torch": "kvtier_kernels.torch_backend:TorchBackend",
}


def backend_names() -> tuple[str, ...]:
    """All names that `get_backend` knows, installed or not."""
    return tuple(_NAME_TO_CLASS)


def get_backend(name: str) -> KernelBackend[BlockPlanes]:
    """A new back end; raises KernelError for an unknown name or one whose library cannot be imported."""
    if name not in _NAME_TO_CLASS:
        raise KernelError(f"no back end {name!r}, known are {', '.join(_NAME_TO_CLASS)}")
    module_name, class_name = _NAME_TO_CLASS[name].split(":")
    try:
        backend = getattr(import_module(module_name), class_name)()
    except ImportError as error:
        raise KernelError(f"back end {name!r} cannot be imported: {error}") from error
    assert isinstance(backend, KernelBackend)
    return backend


def default_backend() -> KernelBackend[BlockPlanes]:
    """`numpy`: needs nothing else and starts no threads. For pools of separate tensors `torch` gathers faster."""
    return get_backend("numpy")
