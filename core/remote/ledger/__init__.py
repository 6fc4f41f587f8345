"""What calls cost, in tokens and money."""
