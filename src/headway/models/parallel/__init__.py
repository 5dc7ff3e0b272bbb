"""Several processes, one model: what each of them holds and computes, and what they exchange."""
