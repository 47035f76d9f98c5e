"""How ranks start, stop and are watched: command line, launcher, signals, watchdog, locks, progress."""
