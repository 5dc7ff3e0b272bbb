"""Feeding: packs made ahead by worker processes, and the exact place to go on from."""
