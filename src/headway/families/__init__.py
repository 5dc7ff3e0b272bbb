"""Families of models that transformers does not have, one package each; `headway.plugins` says what they bring."""
