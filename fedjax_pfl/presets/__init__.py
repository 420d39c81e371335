"""Configurations of the papers' experiments and of other methods, by name.

Each module has `get_config(preset)`. Its docstring lists the words that a preset is made of.
"""

from fedjax_pfl.presets import baseline, factorized_fl, fedmn, pfedhn, pfedla

SYSTEMS = {
    "baseline": baseline,
    "factorized_fl": factorized_fl,
    "fedmn": fedmn,
    "pfedhn": pfedhn,
    "pfedla": pfedla,
}
