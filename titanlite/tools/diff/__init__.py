"""The command `titanlite diff`: find where two runs differ first, by their fingerprints."""
