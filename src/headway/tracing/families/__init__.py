"""What has to be known by name: functions and methods that compute a recurrence or a window in chunks and padding.

Each file holds a table from the name of a function, or of a class and its method, to the stand-in that records the
work it does.
"""
