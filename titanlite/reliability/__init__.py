"""What keeps a run alive, or ends it with its true cause: signals, hangs, locks, divergence and corrupted data."""
