"""Convert a TOML file of torchtitan to a config of titanlite, and list what became of each key."""
