"""The presets of pfedla, under the path that --config takes; see its folder in papers."""

from fedjax_pfl.presets.pfedla import get_config as get_config
