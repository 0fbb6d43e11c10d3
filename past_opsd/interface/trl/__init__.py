"""PAST for scripts written for TRL: `from past_opsd import PASTTrainer, PASTConfig`.

A thin shell: the configuration becomes a recipe, the dataset becomes files in `output_dir/data`, the reward function
becomes the verifier, and the same loop runs. So everything else works on the folder: `past report`, `past probe`,
`past export`, and `past train OUTPUT_DIR/recipe.toml --resume` for rewards that can be imported.
"""

from __future__ import annotations

from past_opsd.interface.trl.config import PASTConfig, recipe
from past_opsd.interface.trl.trainer import PASTTrainer

__all__ = ["PASTConfig", "PASTTrainer", "recipe"]
