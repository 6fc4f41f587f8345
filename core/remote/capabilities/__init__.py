"""What an endpoint can do: given, known, or found out by probes."""
