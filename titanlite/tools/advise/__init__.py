"""The layout search: which parallel layout to train a model with on so many devices.

search_space.py has the layouts, memory_bound.py says which are worth a plan, search.py plans the most promising ones,
explanation.py says why one is recommended. The command is `titanlite advise` (command.py).
"""
