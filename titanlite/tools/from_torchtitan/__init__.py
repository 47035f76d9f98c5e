"""A TOML file of torchtitan as a config of titanlite, with a listing of every key."""
