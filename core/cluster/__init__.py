"""Several runtimes behind one: replicas on Ray, and the router before them."""
