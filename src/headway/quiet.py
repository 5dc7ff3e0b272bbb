"""Imported first by the command line and by data workers: libraries that complain as they are imported keep it short.

transformers imports torchao wherever it is installed, which warns of compiled kernels for other devices and of torch's
own deprecations, four lines for each process (torchao 0.18, torch 2.13). Errors are still said.
"""

import logging

for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)
