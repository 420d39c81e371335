"""The presets of factorized_fl, under the path that --config takes; see its folder in papers."""

from experiments.papers.factorized_fl.presets import get_config as get_config
