"""Campaigns and long runs that look for what no test of a few seconds finds."""
