"""Modules and functions of models that have to be known by name; nothing else in `tracing` knows one.

Most files hold a table from the name of a function, or of a class and its method, to the stand-in that records the work
it does: recurrences, attention in windows, experts. `surplus` also says how much more than needed some classes run.
"""

# model types of towers that make a mask for any attention but a flash kernel, to which they hand no boundaries either
# (transformers 5.17)
MASKED_TOWERS = ("pixtral",)
