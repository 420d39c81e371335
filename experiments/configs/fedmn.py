"""The presets of fedmn, under the path that --config takes; see its folder in papers."""

from experiments.papers.fedmn.presets import get_config as get_config
