"""The outputs of a run: console, metrics.jsonl, TensorBoard, profiles, and a record of hardware and versions."""
