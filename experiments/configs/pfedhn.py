"""The presets of pfedhn, under the path that --config takes; see its folder in papers."""

from experiments.papers.pfedhn.presets import get_config as get_config
