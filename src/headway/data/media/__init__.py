"""Images, videos and sound: sizes from their headers, and what a model reads of them.

`lengths` says what a sample will occupy; `images`, `videos` and `audio` open and decode; `patches` and `video_patches`
lay pixels out as vision patches; `placeholders` turns text with placeholders into tokens.
"""
