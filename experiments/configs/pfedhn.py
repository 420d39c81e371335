"""The presets of pfedhn, under the path that --config takes; see its folder in papers."""

from fedjax_pfl.presets.pfedhn import get_config as get_config
