"""From a name, a folder or loaded objects to a model that has been checked and warmed up."""
