"""Imported first by the command line and by data workers: libraries that complain as they are imported keep it short.

transformers imports torchao wherever it is installed, which warns of compiled kernels for other devices and of torch's
own deprecations, four lines for each process (torchao 0.18, torch 2.13). Its Qwen2-Audio warns of placeholders that are
expanded by the model, which is how it is traced (5.23). Errors are still said.
"""

import logging

_QWEN2_AUDIO = "transformers.models.qwen2_audio.modeling_qwen2_audio"
_LIBRARIES = ("torchao", "torch.utils._pytree", _QWEN2_AUDIO)
for _library in _LIBRARIES:
    logging.getLogger(_library).setLevel(logging.ERROR)


def let_complain() -> None:
    """Take that back, in a process that becomes somebody else's program."""
    for library in _LIBRARIES:
        logging.getLogger(library).setLevel(logging.NOTSET)
