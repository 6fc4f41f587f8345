"""Programs at an endpoint: branches, turns, values, constraints."""
