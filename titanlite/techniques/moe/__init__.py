"""Mixture of experts: the feed-forward layer of many experts, its router, and the balance of their load."""
