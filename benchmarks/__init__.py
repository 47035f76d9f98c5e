"""Measurements, in folders by what a script is for."""
