"""The presets of fedmn, under the path that --config takes; see its folder in papers."""

from fedjax_pfl.presets.fedmn import get_config as get_config
