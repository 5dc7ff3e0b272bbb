"""Advice on what to do first: rules that read a waterfall and its evidence."""
