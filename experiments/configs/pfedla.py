"""The presets of pfedla, under the path that --config takes; see its folder in papers."""

from experiments.papers.pfedla.presets import get_config as get_config
