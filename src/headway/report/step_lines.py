"""Names of the lines that the time of a step is divided into, whether predicted or measured."""

NAMES = {
    "useful": "useful work at peak",
    "ceiling": "ceiling loss",
    "recomputation": "recomputation",
    "padding": "padding and masked work",
    "matmul": "matmul-class kernels",
    "memory": "memory-bound kernels",
    "optimizer": "optimizer and clipping",
    "communication": "exposed communication",
    "communication.transfer": "exposed communication: transfer",
    "communication.waiting": "exposed communication: waiting",
    "copies": "exposed copies",
    "idle.data": "idle: waiting for data",
    "idle.launch": "idle: host late (launches)",
    "idle.sync": "idle: host waits (sync)",
    "idle.other": "idle: other",
    "gap.input": "between batch and forward",
    "gap.gradients": "between backward and update",
    "gap.after": "behind the update",
    "aside": "logging, eval, checkpoint, compile",
    "unexplained": "unexplained: unknown kernels",
}
SLOW = "slow"
"""Begins the lines of what each component takes longer than at the ceiling; short, as components have long names."""
