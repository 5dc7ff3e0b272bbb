"""Made-up data and small models: `digits` with its recipe is the demo; the rest serves scaled-down recipes."""
