"""The command `titanlite diff`: where two runs differ first, by their fingerprints."""
