"""Made-up data and small models: `digits` with its recipe is the demo; the others serve scaled-down recipes."""
