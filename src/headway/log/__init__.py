"""Places where numbers go: JSON lines, a live line, TensorBoard, Weights & Biases, MLflow, Prometheus."""
