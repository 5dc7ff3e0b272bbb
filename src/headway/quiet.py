"""Imported first by the command line and by data workers: libraries that complain as they are imported keep it short.

transformers imports torchao wherever it is installed, which warns of compiled kernels for other devices and of torch's
own deprecations, four lines for each process (torchao 0.18, torch 2.13). Its Qwen2-Audio warns of placeholders that are
expanded by the model, which is how it is traced (5.23). Errors are still said.
"""

import logging

_QWEN2_AUDIO = "transformers.models.qwen2_audio.modeling_qwen2_audio"
for _library in ("torchao", "torch.utils._pytree", _QWEN2_AUDIO):
    logging.getLogger(_library).setLevel(logging.ERROR)
