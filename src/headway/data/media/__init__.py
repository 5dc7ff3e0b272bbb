"""Images, videos and sound: lengths from their headers, and tensors that a model reads.

`images`, `videos` and `audio` open and decode, each for one kind of media; `media_reader` opens all media of a chat and
lays pictures out as vision patches; `placeholders` turns text with placeholders into tokens.
"""
