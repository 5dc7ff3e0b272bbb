"""`headway import-config`: configurations of other engines as recipes."""

from headway.importing.read import Imported, KeyFate, import_config

__all__ = ["Imported", "KeyFate", "import_config"]
