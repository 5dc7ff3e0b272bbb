"""Objectives of training beside cross-entropy, one package each; `headway.plugins` says what they bring."""
