"""Images, videos and sound: lengths from their headers, and tensors that a model reads.

`images`, `videos` and `audio` open and decode, each for one kind of media; `image_patches` lays pictures out as vision
patches; `opened` opens all media of a chat; `placeholders` turns text with placeholders into tokens.
"""
