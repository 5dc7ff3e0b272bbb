"""The time of a step, split into lines that add up to the step exactly. No torch.

`read_trace` turns a file into columns, `attribute` finds what each kernel was for, `explain` makes the waterfall.
Without a trace, `records` and `logs` make it of what was written down; `compare` holds two against each other.
"""
