"""Version of Flower that the deployment is tested with."""

from importlib import metadata

from fedjax_pfl.core.errors import UsageError

TESTED = "1.42"  # as in the extra `flower` of setup.cfg


def check() -> None:
    """Raises UsageError if Flower is not installed in the tested version."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        problem = "Flower is not installed"
    else:
        if version.startswith(f"{TESTED}."):
            return
        problem = f"Flower {version} is installed, and only {TESTED} is tested"
    raise UsageError(f"{problem}; run pip install 'flwr=={TESTED}.*'")
