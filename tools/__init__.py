"""Developers' tools: none of them ships with the package."""
