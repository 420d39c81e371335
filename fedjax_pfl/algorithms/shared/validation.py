"""Check that every client has validation examples, for methods that read them."""

import numpy as np

from fedjax_pfl.core.algorithm import Federation
from fedjax_pfl.core.errors import UsageError


def require_validation(use: str, federation: Federation) -> None:
    """Raises UsageError if a client has no validation examples.

    Args:
      use: Start of the message, before "validation examples", such as "fedfomo weighs peers on".
      federation: The clients.
    """
    counts = federation.validation_counts
    without = np.flatnonzero(np.zeros(federation.clients) == 0 if counts is None else counts == 0)
    if len(without):
        more = f" and {len(without) - 1} others have" if len(without) > 1 else " has"
        raise UsageError(
            f"{use} validation examples, and client {without[0]}{more} none; "
            "use a larger validation_fraction, such as 0.2, or a more even partition"
        )
