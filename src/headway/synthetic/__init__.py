"""The demonstration: scikit-learn's handwritten digits as chat samples, a small model folder, and its recipe."""
