"""What a run writes and says: console, metrics.jsonl, TensorBoard, profiles, its hardware and versions."""
