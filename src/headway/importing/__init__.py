"""`headway import-config`: configurations of other engines as recipes."""

from headway.importing.read import Imported, KeyOutcome, import_config

__all__ = ["Imported", "KeyOutcome", "import_config"]
