"""Checkpoints: all that an exact continuation needs, in pieces that any number of processes can put together again.

`folder.py` says what a whole checkpoint is on disk, `state.py` what goes into it, `saver.py` writes it while training
goes on, `restore.py` brings a run back to it.

    checkpoints/step-000400/
        __0_0.distcp, __1_0.distcp ...   each process's part of the weights and of the optimizer's state
        .metadata                        where each tensor's pieces are (torch.distributed.checkpoint)
        rank-00000.pt ...                each process's random generators
        position.json                    the place in the data, of all processes together
        model/                           config, generation config and processor, for the export
        manifest.json                    step, processes, mesh; every file with bytes and sha256
"""

from headway.checkpoint.folder import Checkpoint, latest_checkpoint, open_checkpoint, refuse_half_written
from headway.checkpoint.restore import find_checkpoint, newest_sound, restore
from headway.checkpoint.saver import CheckpointSaver, Contents
from headway.checkpoint.state import random_state, restore_random_state, training_tensors

__all__ = [
    "Checkpoint",
    "CheckpointSaver",
    "Contents",
    "find_checkpoint",
    "latest_checkpoint",
    "newest_sound",
    "open_checkpoint",
    "random_state",
    "refuse_half_written",
    "restore",
    "restore_random_state",
    "training_tensors",
]
