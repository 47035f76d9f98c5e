"""The layout search: which parallel layout to train a model with on a given number of devices.

search_space.py lists the layouts, memory_bound.py says which are worth a plan, search.py plans the most promising ones,
and explanation.py says why one is recommended. The command is `titanlite advise` (command.py).
"""
