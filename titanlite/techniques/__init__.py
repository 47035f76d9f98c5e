"""Techniques run only if an option asks for them. Modules outside this folder import them inside functions."""
