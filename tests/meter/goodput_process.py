"""A process that trains for pretend and keeps a ledger; tests/meter/test_goodput.py kills it.

    python goodput_process.py LEDGER RESUME_FROM NUM_STEPS CHECKPOINT_EVERY

After NUM_STEPS it closes the ledger, or with CHECKPOINT_EVERY below 0 hangs in the next step. Prints the steps, and the
monotonic clock before and after the ledger is opened and before and after it is closed.
"""

import sys
import time

from headway.meter.goodput import Goodput


def say(word, value):
    sys.stdout.write(f"{word} {value}\n")
    sys.stdout.flush()


say("opening", time.monotonic())
ledger = Goodput(sys.argv[1], heartbeat_s=0.1)
say("open", time.monotonic())
resume_from, num_steps, checkpoint_every = map(int, sys.argv[2:])
time.sleep(0.1)
if resume_from:
    ledger.resumed(resume_from)
for step in range(resume_from + 1, num_steps + 1):
    ledger.switch("data wait")
    time.sleep(0.01)
    ledger.switch("step")
    time.sleep(0.04)
    say("step", step)
    if step % abs(checkpoint_every) == 0:
        with ledger.bucket("checkpoint"):
            time.sleep(0.05)
        ledger.checkpoint_saved(step)
if checkpoint_every < 0:
    time.sleep(600)
say("closing", time.monotonic())
ledger.close()
say("closed", time.monotonic())
