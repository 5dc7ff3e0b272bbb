"""Objectives of training beside cross-entropy, one package each; `headway.plugins` lists their parts."""
