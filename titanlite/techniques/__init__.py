"""A technique runs only if an option asks for it. No module outside this folder imports a technique at its top."""
