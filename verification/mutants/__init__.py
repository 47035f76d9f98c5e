"""Mutation testing: small wrong edits of the package, each of which some test must notice."""
