"""Files that survive a crash of the process or the machine."""
