"""Whole decoder layers on CPUs, and all of them as one compiled call."""
