"""Linear layers on CPUs: weights packed once, for oneDNN's products and for compiled products of few rows."""
