"""A configuration of LMMs-Engine as a recipe: `python -m tools.import_config theirs.yaml -o ours.yaml`."""

from tools.import_config.read import ImportedRecipe, KeyOutcome, import_config

__all__ = ["ImportedRecipe", "KeyOutcome", "import_config"]
