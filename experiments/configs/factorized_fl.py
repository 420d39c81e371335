"""The presets of factorized_fl, under the path that --config takes; see its folder in papers."""

from fedjax_pfl.presets.factorized_fl import get_config as get_config
