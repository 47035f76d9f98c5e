"""Kills, stops and damages runs at aimed moments, and compares the curve that remains with an undisturbed run's."""
