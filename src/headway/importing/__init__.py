"""`headway import-config`: configurations of other engines as recipes."""

from headway.importing.read import ImportedRecipe, KeyOutcome, import_config

__all__ = ["ImportedRecipe", "KeyOutcome", "import_config"]
