"""The time of a step, split into lines that add up to the step exactly. No torch.

`trace.read_trace` turns a file into columns (`events`), `attribution` finds what each event was for, `measurement`
divides the steps among events, and `waterfall.explain` makes an `explanation` of them. Without a trace, `records` makes
it of what was written down. `findings` say what to do first; `text`, `breakdown` and `comparison` show it.
"""
