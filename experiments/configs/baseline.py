"""The presets of baseline, under the path that --config takes."""

from fedjax_pfl.presets.baseline import get_config as get_config
