"""Techniques: each is in use only if an option asks for it. The rest of the package imports none of them at its top."""
