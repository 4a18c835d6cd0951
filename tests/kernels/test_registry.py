"""Back ends by name, and what importing them costs."""

import subprocess
import sys

import pytest

from kvtier_kernels import KernelBackend, KernelError, backend_names, default_backend, get_backend


def test_names() -> None:
    assert set(backend_names()) == {"reference", "numpy", "torch"}
    assert all(isinstance(get_backend(name), KernelBackend) for name in backend_names())
    assert type(default_backend()) is type(get_backend("numpy"))


def test_unknown_name() -> None:
    with pytest.raises(KernelError, match=r"'cuda'.*reference, numpy, torch"):
        get_backend("cuda")


def test_numpy_users_need_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None  # importing it now fails
import numpy as np
from kvtier_kernels import BlockPlanes, KernelError, default_backend, get_backend
planes = BlockPlanes.from_arrays([np.ones((2, 4)), np.ones((2, 4))])
host = np.zeros(planes.block_bytes, np.uint8)
default_backend().gather(planes, [1], host, [0])
assert host.view(np.float64).tolist() == [1.0] * 8
try:
    get_backend("torch")
except KernelError as error:
    assert "'torch' cannot be imported" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
