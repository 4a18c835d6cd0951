"""The error of this package."""


class KernelError(ValueError):
    """A pool, a host buffer or a list of copies that cannot be used. Raised before any byte moves."""
