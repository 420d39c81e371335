"""Differential privacy around any method that admits it."""

from fedjax_pfl.transforms.privacy.client_level import client_privacy
from fedjax_pfl.transforms.privacy.example_level import example_privacy
from fedjax_pfl.transforms.privacy.local_level import local_privacy
from fedjax_pfl.transforms.privacy.settings import PRIVACY, fixed_noise

__all__ = ["PRIVACY", "client_privacy", "example_privacy", "fixed_noise", "local_privacy"]
