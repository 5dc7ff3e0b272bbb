"""Where every second of a profiled step went, in lines that add up to the step exactly. No torch.

`read_trace` turns a file into columns, `attribute` finds what each kernel was for, `explain` makes the waterfall.
"""
